"""Hugging Face's description of a model, its config.json, and our configuration: both ways.

transformers' own classes fill in what a config.json leaves out, and read both ways of writing
rotary positions: `rope_parameters`, and `rope_theta` with `rope_scaling`, as before transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from config.errors import ConfigError
from config.llama import (
    FULL,
    UNROTATED,
    UNROTATED_WINDOW,
    WINDOW,
    LlamaConfig,
    LlamaExperts,
    LlamaModel,
)
from files.json_files import Fields
from files.shown import shown, shown_name, shown_names
from modelling.config_json import check_settings, defaults, is_token, type_of

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
"""The class of transformers that a model of an architecture is."""

GEMMA, OLMO = ("gemma2", "gemma3_text"), ("olmo2", "olmo3")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")
ONE_WINDOW = ("mistral", "ministral3", "phi3", "mixtral", "qwen3_moe")
"""Architectures whose layers all have the window, if there is one."""
TWO_ANGLES = ("gemma3_text", "olmo3")
"""Architectures whose layers with a window have angles of their own."""
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
EVERYWHERE = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "head_dim"}
"""Settings that all architectures read, whether or not their classes name them."""

LEGACY = {"gemma3_text": {"rope_local_base_freq", "sliding_window_pattern"}}
"""Settings of older files of an architecture, of which transformers makes those of today."""

READ = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "hidden_activation", "rms_norm_eps",
    "max_position_embeddings", "initializer_range", "tie_word_embeddings", "attention_bias",
    "mlp_bias", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
    "original_max_position_embeddings", "layer_types", "sliding_window", "use_sliding_window",
    "no_rope_layers", "bos_token_id", "eos_token_id", "pad_token_id",
    "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "shared_expert_intermediate_size", "qkv_bias", "output_router_logits", "router_aux_loss_coef",
    "swiglu_alpha", "swiglu_limit",
}  # fmt: skip
"""Settings that are read where an architecture has them."""

COUNTS = {"num_experts", "num_local_experts"}
"""The two names of the number of experts, of which transformers takes either."""

ONLY = {"full_attn_mod": 1, "interpolate_factor": 1}
"""Settings of Phi-4-mini's files that transformers does not have, and the value that means none."""

ROTARY = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": (
        "factor", "short_factor", "long_factor", "attention_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor", "beta_fast", "beta_slow", "attention_factor", "truncate",
        "original_max_position_embeddings",
    ),
}  # fmt: skip
"""Ways of scaling rotary positions, and their settings."""

GROWTH = "llama_4_scaling_beta"
"""A setting of Ministral 3's rotary positions, whatever the way."""


# ---- from config.json ---------------------------------------------------------------------------
def from_config_json(description: Fields) -> dict[str, Any]:
    """Fields of the model section for a config.json.

    Raises:
        ConfigError: it has a setting that is not known, or a value that is not computed with.
    """
    kind = description.text("model_type")
    theirs = _as_transformers(kind, description.data)
    heads = theirs.num_attention_heads
    scale, tied = _scales(kind, theirs), theirs.tie_word_embeddings
    return {
        "architecture": kind,
        "layers": theirs.num_hidden_layers,
        "hidden_size": theirs.hidden_size,
        "inner_size": getattr(theirs, "moe_intermediate_size", theirs.intermediate_size),
        "max_length": theirs.max_position_embeddings,
        "activation": _activation(theirs),
        "feed_forward_bias": bool(getattr(theirs, "mlp_bias", False)),
        "norms": "after" if kind in OLMO else "both" if kind in GEMMA else "before",
        "norms_from_one": kind in GEMMA,
        "norm_epsilon": theirs.rms_norm_eps,
        "residual_scale": getattr(theirs, "residual_multiplier", 1.0),
        "logits_divisor": getattr(theirs, "logits_scaling", 1.0),
        "logits_cap": getattr(theirs, "final_logit_softcapping", None),
        "initializer_range": theirs.initializer_range,
        **_tokens(theirs),
        "embedding": {"vocab_size": theirs.vocab_size, "scale": scale["embedding"], "tied": tied},
        "attention": {
            "heads": heads,
            "key_value_heads": theirs.num_key_value_heads or heads,
            "head_size": getattr(theirs, "head_dim", None) or theirs.hidden_size // heads,
            **_layers(kind, theirs),
            "scale": scale["scores"],
            "cap": getattr(theirs, "attn_logit_softcapping", None),
            "norms": _query_key_norms(kind),
            "input_bias": _input_bias(kind, theirs),
            "output_bias": bool(getattr(theirs, "attention_bias", False)),
            "sinks": kind == "gpt_oss",
            "rotary": _rotary(kind, theirs),
        },
        "experts": _experts(kind, theirs),
    }


def _as_transformers(kind: str, data: Mapping[str, Any]) -> Any:
    """transformers' configuration, with all that is left out. Raises as `from_config_json`."""
    data = _today(kind, data)
    usual, common = defaults(kind)
    read = EVERYWHERE | LEGACY.get(kind, set()) | (READ & usual.keys())
    read |= COUNTS if kind in MIXTURES else set()
    check_settings(data, kind, read, {name: (x, x) for name, x in ONLY.items() if name in data})
    try:
        asked = read | (usual.keys() - common)
        return type_of(kind).from_dict({n: value for n, value in data.items() if n in asked})
    except Exception as error:  # its checks raise many kinds
        reason = str(error).strip().splitlines()[-1].strip()
        raise ConfigError(f"the model's config.json is wrong: {shown_name(reason, 160)}") from None


def _today(kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as transformers reads it today: it checks lengths under the name "longrope"
    alone, before it takes "su", the name when Phi-3 came out, for the same. gpt-oss's experts in
    few bits are expanded as they are read (`modelling.weights.mxfp4`). LLaMA 1 has -1 for a token
    that there is not."""
    data = {n: None if n.endswith("_token_id") and x == -1 else x for n, x in data.items()}
    packed = data.get("quantization_config")
    if kind == "gpt_oss" and isinstance(packed, Mapping) and packed.get("quant_method") == "mxfp4":
        data = {name: value for name, value in data.items() if name != "quantization_config"}
    scaling = data.get("rope_scaling")
    if kind == "phi3" and isinstance(scaling, Mapping) and scaling.get("type") == "su":
        return {**data, "rope_scaling": {**scaling, "type": "longrope"}}
    return dict(data)


def _activation(theirs: Any) -> str:
    name = getattr(theirs, "hidden_activation", None) or getattr(theirs, "hidden_act", None)
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"the model's config.json has the activation {shown(name)}, but must have "
            f"{' or '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _scales(kind: str, theirs: Any) -> dict[str, Any]:
    """Factors on embeddings and on scores."""
    if kind in GEMMA:
        return {
            "embedding": math.sqrt(theirs.hidden_size),
            "scores": theirs.query_pre_attn_scalar**-0.5,
        }
    embedding = getattr(theirs, "embedding_multiplier", 1.0)
    return {"embedding": embedding, "scores": getattr(theirs, "attention_multiplier", None)}


def _input_bias(kind: str, theirs: Any) -> bool:
    """Whether queries, keys and values have biases."""
    asked = getattr(theirs, "attention_bias", False) or getattr(theirs, "qkv_bias", False)
    return kind == "qwen2" or bool(asked)


def _experts(kind: str, theirs: Any) -> dict[str, Any]:
    if kind not in MIXTURES:
        return LlamaExperts().to_dict()
    return {
        "count": theirs.num_experts,
        "chosen": theirs.num_experts_per_tok,
        "normalised": getattr(theirs, "norm_topk_prob", True),
        "shared_size": getattr(theirs, "shared_expert_intermediate_size", None),
        "biases": kind == "gpt_oss",
        "gate_limit": getattr(theirs, "swiglu_limit", None),
        "gate_slope": getattr(theirs, "swiglu_alpha", LlamaExperts.gate_slope),
        "balance": theirs.router_aux_loss_coef if theirs.output_router_logits else 0.0,
    }


def _query_key_norms(kind: str) -> str | None:
    if kind in (*OLMO, "olmoe"):
        return "projections"
    return "heads" if kind in ("qwen3", "qwen3_moe", "gemma3_text") else None


def _tokens(theirs: Any) -> dict[str, Any]:
    """Special tokens: the first of several ends, and all; without padding, the end fills up."""
    tokens_of_kind = {
        "start_token": theirs.bos_token_id,
        "end_token": theirs.eos_token_id,
        "pad_token": theirs.pad_token_id,
    }
    first = {n: t[0] if isinstance(t, Sequence) and t else t for n, t in tokens_of_kind.items()}
    known = {n: t if is_token(t, theirs.vocab_size) else None for n, t in first.items()}
    end = known["end_token"] or 0
    pad = known["pad_token"] if known["pad_token"] is not None else end
    several = theirs.eos_token_id if isinstance(theirs.eos_token_id, Sequence) else []
    ends = {token for token in several if is_token(token, theirs.vocab_size)}
    listed = ",".join(map(str, sorted(ends))) if len(ends) > 1 else None
    return known | {"end_token": end, "end_tokens": listed, "pad_token": pad}


def _layers(kind: str, theirs: Any) -> dict[str, Any]:
    """The pattern of the layers, as short as it can be, and their window."""
    count = theirs.num_hidden_layers
    types = getattr(theirs, "layer_types", None)
    window = getattr(theirs, "sliding_window", None)
    if types is None or kind in ONE_WINDOW:
        types = ["full_attention" if window is None else "sliding_attention"] * count
    rotated = getattr(theirs, "no_rope_layers", None) or [1] * count
    letters = {
        ("full_attention", True): FULL,
        ("full_attention", False): UNROTATED,
        ("sliding_attention", True): WINDOW,
        ("sliding_attention", False): UNROTATED_WINDOW,
    }
    pairs = [(t, bool(r)) for t, r in zip(types, rotated, strict=False)]
    if len(pairs) != count or not set(pairs) <= letters.keys():
        raise ConfigError(
            f"the model's config.json has layer_types {shown(types)}, but must have full_attention "
            f"or sliding_attention for each of {count} layers"
        )
    kinds = "".join(letters[pair] for pair in pairs)
    period = next(n for n in range(1, count + 1) if (kinds[:n] * count)[:count] == kinds)
    used = {WINDOW, UNROTATED_WINDOW} & set(kinds)
    return {"pattern": kinds[:period], "window": window if used else None}


def _rotary(kind: str, theirs: Any) -> dict[str, Any]:
    scaling, local = dict(theirs.rope_parameters), None
    if kind in TWO_ANGLES:
        near = scaling["sliding_attention"]
        if near.get("rope_type", "default") != "default":
            raise ConfigError(
                "the model's config.json scales the positions of layers with a window "
                f"({shown(near)}), which is not known"
            )
        scaling, local = dict(scaling["full_attention"]), near["rope_theta"]
        scaling.pop("truncate", None)  # transformers asks it only where all angles are alike
    name = scaling.get("rope_type", "default")
    if name not in ROTARY:
        raise ConfigError(
            f"the model's config.json has the rope_type {shown(name)}, but there are: "
            f"{', '.join(ROTARY)}"
        )
    usual = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if name == "yarn":
        usual |= {"mscale", "mscale_all_dim"}
    if kind == "ministral3":
        usual |= {GROWTH, "max_position_embeddings"}
    usual |= {"original_max_position_embeddings", *ROTARY[name]}
    unknown = [n for n in scaling if n not in usual and not n.startswith("_")]
    if unknown:
        raise ConfigError(
            f"the model's config.json has {shown_names(unknown)} among the settings of the "
            f"rope_type {name}, which is not known there"
        )
    fields = {
        "theta": scaling["rope_theta"],
        "local_theta": local,
        "fraction": scaling.get("partial_rotary_factor", 1.0),
        "type": name,
        "query_growth": scaling.get(GROWTH) or 0.0,
    }
    return fields | _scaling(name, scaling, theirs.max_position_embeddings)


def _scaling(name: str, scaling: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Fields of a way of scaling; `longest`: tokens of the longest texts."""
    original: Any = scaling.get("original_max_position_embeddings")
    match name:
        case "linear" | "dynamic":
            return {"factor": scaling["factor"]}
        case "llama3":
            return {
                "factor": scaling["factor"],
                "low_frequency": scaling["low_freq_factor"],
                "high_frequency": scaling["high_freq_factor"],
                "original_length": original,
            }
        case "longrope":
            factor, attention = scaling.get("factor"), scaling.get("attention_factor")
            if attention is None and factor is not None:
                attention = math.sqrt(1 + math.log(factor) / math.log(original))
            return {
                "original_length": original,
                "short_factors": _joined(scaling["short_factor"]),
                "long_factors": _joined(scaling["long_factor"]),
                "attention_factor": attention,
            }
        case "yarn":
            factor = scaling["factor"] or longest / original
            return {
                "factor": factor,
                "original_length": original,
                "fast_turns": scaling.get("beta_fast") or 32,
                "slow_turns": scaling.get("beta_slow") or 1,
                "attention_factor": _yarn_attention(scaling, factor),
                "truncate": bool(scaling.get("truncate", True)),
            }
    return {}


def _yarn_attention(scaling: Mapping[str, Any], factor: float) -> float | None:
    """The factor on turned features, where two more settings decide it."""
    ends = [scaling.get(name) for name in ("mscale", "mscale_all_dim")]
    attention_factor: float | None = scaling.get("attention_factor")
    if attention_factor is not None or not all(ends) or factor <= 1:
        return attention_factor
    over, under = (0.1 * end * math.log(factor) + 1 for end in ends if end)
    return over / under


def _joined(factors: Sequence[float]) -> str:
    return ",".join(map(repr, map(float, factors)))


# ---- to config.json -----------------------------------------------------------------------------
def to_config_json(config: LlamaConfig) -> dict[str, Any]:
    """Hugging Face's configuration of the model, with rotary positions written in both ways.

    Raises:
        ConfigError: there is no such model of its architecture.
    """
    model = config.model
    description = {
        "model_type": model.architecture,
        "architectures": [ARCHITECTURES[model.architecture]],
        **_plain(model),
        **_of_architecture(model),
        **_positions(model),
    }
    _check_same(model, description)
    return description


def _plain(model: LlamaModel) -> dict[str, Any]:
    """Settings that all architectures have."""
    attention, ends = model.attention, model.further_ends
    return {
        "vocab_size": model.embedding.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.inner_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.key_value_heads,
        "max_position_embeddings": model.max_length,
        "rms_norm_eps": model.norm_epsilon,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.embedding.tied,
        "attention_dropout": model.dropout_prob,
        "bos_token_id": model.start_token,
        "eos_token_id": [model.end_token, *ends] if ends else model.end_token,
        "pad_token_id": model.pad_token,
    }


def _of_architecture(model: LlamaModel) -> dict[str, Any]:
    """Settings that the architecture's class has besides."""
    attention, experts = model.attention, model.experts
    activations = {ours: name for name, ours in ACTIVATIONS.items()}
    known, _ = defaults(model.architecture)
    activation = activations[model.activation]
    candidates = {
        "hidden_act": activation,
        "hidden_activation": activation,
        "attention_bias": attention.output_bias,
        "mlp_bias": model.feed_forward_bias,
        "query_pre_attn_scalar": _scalar(attention.scale or attention.head_size**-0.5),
        "attn_logit_softcapping": attention.cap,
        "final_logit_softcapping": model.logits_cap,
        "embedding_multiplier": model.embedding.scale,
        "attention_multiplier": attention.scale or attention.head_size**-0.5,
        "residual_multiplier": model.residual_scale,
        "logits_scaling": model.logits_divisor,
        "num_experts": experts.count,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": model.inner_size,
        "norm_topk_prob": experts.normalised,
        "shared_expert_intermediate_size": experts.shared_size,
        "swiglu_limit": experts.gate_limit,
        "swiglu_alpha": experts.gate_slope,
        "qkv_bias": attention.input_bias,
        "output_router_logits": experts.balance > 0,
    }
    if experts.balance:
        candidates["router_aux_loss_coef"] = experts.balance
    settings = {name: value for name, value in candidates.items() if name in known}
    if "head_dim" in known or attention.head_size * attention.heads != model.hidden_size:
        settings["head_dim"] = attention.head_size
    return settings


def _scalar(scale: float) -> float:
    """scale = scalar^-1/2; whole numbers stay what they were."""
    scalar = scale**-2
    return round(scalar) if math.isclose(scalar, round(scalar), rel_tol=1e-12) else scalar


def _positions(model: LlamaModel) -> dict[str, Any]:
    """Windows and rotary positions."""
    attention, rotary = model.attention, model.attention.rotary
    known, _ = defaults(model.architecture)
    settings: dict[str, Any] = {}
    windows = [kind in (WINDOW, UNROTATED_WINDOW) for kind in model.kinds]
    if "sliding_window" in known:
        settings["sliding_window"] = attention.window
    if "use_sliding_window" in known:
        settings["use_sliding_window"] = any(windows)
    if "layer_types" in known:
        names = ("full_attention", "sliding_attention")
        settings["layer_types"] = [names[window] for window in windows]
    if "no_rope_layers" in known:
        settings["no_rope_layers"] = [int(kind in (FULL, WINDOW)) for kind in model.kinds]
    scaling = _rope_scaling(model)
    parameters: dict[str, Any] = {
        "rope_theta": rotary.theta,
        **(scaling or {"rope_type": "default"}),
    }
    settings |= {"rope_theta": rotary.theta, "rope_scaling": scaling}
    if rotary.fraction != 1:
        settings["partial_rotary_factor"] = parameters["partial_rotary_factor"] = rotary.fraction
    if "original_max_position_embeddings" in known:
        original = rotary.original_length or model.max_length
        settings["original_max_position_embeddings"] = original
    if rotary.local_theta is not None:
        near = {"rope_type": "default", "rope_theta": rotary.local_theta}
        if model.architecture in LEGACY:
            settings["rope_local_base_freq"] = rotary.local_theta
        parameters = {"sliding_attention": near, "full_attention": parameters}
    return settings | {"rope_parameters": parameters}


def _rope_scaling(model: LlamaModel) -> dict[str, Any] | None:
    rotary = model.attention.rotary
    if rotary.type == "default":
        return None
    values = {
        "factor": rotary.factor,
        "low_freq_factor": rotary.low_frequency,
        "high_freq_factor": rotary.high_frequency,
        "original_max_position_embeddings": rotary.original_length,
        "beta_fast": rotary.fast_turns,
        "beta_slow": rotary.slow_turns,
        "short_factor": _split(rotary.short_factors),
        "long_factor": _split(rotary.long_factors),
        "attention_factor": rotary.attention_factor,
        "truncate": None if rotary.truncate else False,
    }
    settings = [name for name in ROTARY[rotary.type] if values[name] is not None]
    if rotary.type == "longrope":
        settings.remove("factor")
    grows = {GROWTH: rotary.query_growth} if rotary.query_growth else {}
    return {"rope_type": rotary.type, **{name: values[name] for name in settings}, **grows}


def _split(factors: str | None) -> list[float] | None:
    return None if factors is None else [float(x) for x in factors.split(",")]


def _check_same(model: LlamaModel, description: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a description says all of what the model does."""
    ours, said = model.to_dict(), from_config_json(Fields(dict(description), "config.json"))
    for each in (ours["attention"], said["attention"]):
        each["scale"] = each["scale"] or model.attention.head_size**-0.5
    if model.further_ends:  # whether or not they name the end token again
        ours["end_tokens"] = ",".join(map(str, sorted({model.end_token, *model.further_ends})))
    else:
        ours["end_tokens"] = None
    difference = _difference(ours, said)
    if difference is not None:
        name, value, expected = difference
        raise ConfigError(
            f"the configuration has model.{name} {shown(value)}, but a model of "
            f"model.architecture {model.architecture} has {shown(expected)}"
        )


def _difference(
    ours: Mapping[str, Any], said: Mapping[str, Any], path: str = ""
) -> tuple[str, Any, Any] | None:
    """The first field that differs: name, our value and theirs."""
    for name, value in said.items():
        own = ours[name]
        if isinstance(value, Mapping):
            difference = _difference(own, value, f"{path}{name}.")
            if difference is not None:
                return difference
        elif not _alike(own, value):
            return f"{path}{name}", own, value
    return None


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)


def normalise(config: LlamaConfig, description: Mapping[str, Any]) -> dict[str, Any]:
    """A description of a model as `to_config_json` writes it, whichever dialect it is in."""
    model = LlamaModel.from_dict(
        config.model.to_dict() | from_config_json(Fields(dict(description), "it"))
    )
    return to_config_json(replace(config, model=model))
