"""The config.json of Llama-shaped models, read and written.

transformers' own classes fill in what a config.json leaves out, and read both ways of writing
rotary positions: `rope_parameters`, and `rope_theta` with `rope_scaling`, as before transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

from config.base import flattened
from config.errors import ConfigError
from config.llama import FULL, MIXTURES, ROPE_TYPES, SLIDING, LlamaConfig, LlamaModel, LlamaRope
from config.values import factors
from files.formatting import format_name, format_names, format_value
from files.json_files import JsonObject
from modelling.config_json import check_hf_settings, hf_config_class, hf_defaults, is_token_id

_ACT = {"hidden_act": "hidden_activation"}
_LOCAL = {"num_experts": "num_local_experts"}
_FORMER = frozenset(("rope_local_base_freq", "sliding_window_pattern"))


class Architecture(NamedTuple):
    """Peculiarities of the config.json of a model type.

    Attributes:
        cls: of transformers.
        names: what it calls a setting that we call otherwise.
        former: settings of older files, of which transformers makes those of today.
        one_window: True if all layers have the window, if there is one.
        two_angles: True if layers with a window have angles of their own.
    """

    cls: str
    names: Mapping[str, str] = {}
    former: frozenset[str] = frozenset()
    one_window: bool = False
    two_angles: bool = False


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM"),
    "mistral": Architecture("MistralForCausalLM", one_window=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "phi3": Architecture("Phi3ForCausalLM", one_window=True),
    "gemma2": Architecture("Gemma2ForCausalLM", _ACT),
    "gemma3_text": Architecture("Gemma3ForCausalLM", _ACT, _FORMER, two_angles=True),
    "smollm3": Architecture("SmolLM3ForCausalLM"),
    "olmo2": Architecture("Olmo2ForCausalLM"),
    "granite": Architecture("GraniteForCausalLM"),
    "ministral3": Architecture("Ministral3ForCausalLM", one_window=True),
    "olmo3": Architecture("Olmo3ForCausalLM", two_angles=True),
    "mixtral": Architecture("MixtralForCausalLM", _LOCAL, one_window=True),
    "qwen2_moe": Architecture("Qwen2MoeForCausalLM", {"attention_bias": "qkv_bias"}),
    "qwen3_moe": Architecture("Qwen3MoeForCausalLM", _LOCAL, one_window=True),
    "olmoe": Architecture("OlmoeForCausalLM"),
    "gpt_oss": Architecture("GptOssForCausalLM", _LOCAL),
}

SETTINGS = (
    "vocab_size", "tie_word_embeddings", "num_hidden_layers", "hidden_size", "intermediate_size",
    "max_position_embeddings", "num_attention_heads", "num_key_value_heads", "attention_bias",
    "query_pre_attn_scalar", "attention_multiplier", "attn_logit_softcapping",
    "final_logit_softcapping", "hidden_act", "mlp_bias", "rms_norm_eps", "embedding_multiplier",
    "residual_multiplier", "logits_scaling", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "norm_topk_prob", "shared_expert_intermediate_size",
    "router_aux_loss_coef", "swiglu_limit", "swiglu_alpha", "initializer_range",
)  # fmt: skip
"""Fields that have the value of the setting of their name, where a model type has it."""

READ = {
    *SETTINGS, "layer_types", "sliding_window", "use_sliding_window", "no_rope_layers",
    "bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits",
    "original_max_position_embeddings",
}  # fmt: skip
"""Settings that are read where a model type has them."""

EVERYWHERE = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "head_dim"}
"""Settings that all model types read, whether or not their classes name them."""

ONLY = {"full_attn_mod": 1, "interpolate_factor": 1}
"""Settings of Phi-4-mini's files that transformers does not have, and the value that means none."""

BETA = "llama_4_scaling_beta"
LISTS = ("short_factor", "long_factor")


# ---- from config.json ---------------------------------------------------------------------------
def from_config_json(hf_config: JsonObject) -> dict[str, Any]:
    """Fields of the model section for a config.json.

    Raises:
        ConfigError: it has a setting that is not known, or a value that is not computed with.
    """
    kind = hf_config.text("model_type")
    theirs, names = _as_transformers(kind, hf_config.data), ARCHITECTURES[kind].names
    found: dict[str, Any] = {"model_type": kind}
    for name in SETTINGS:
        value = getattr(theirs, names.get(name, name), None)
        found[name] = getattr(LlamaModel, name) if value is None else value
    heads = found["num_attention_heads"]
    found["num_key_value_heads"] = theirs.num_key_value_heads or heads
    found["head_dim"] = getattr(theirs, "head_dim", None) or theirs.hidden_size // heads
    if not getattr(theirs, "output_router_logits", False):
        found["router_aux_loss_coef"] = 0.0
    return found | _tokens(theirs) | _layers(kind, theirs) | _rope(kind, theirs)


def _as_transformers(kind: str, data: Mapping[str, Any]) -> Any:
    """transformers' configuration, with all that is left out. Raises as `from_config_json`."""
    data, architecture = _today(kind, data), ARCHITECTURES[kind]
    usual, common = hf_defaults(kind)
    read = EVERYWHERE | architecture.former | (READ & usual.keys()) | {*architecture.names.values()}
    read |= {"num_experts", "num_local_experts"} if kind in MIXTURES else set()
    check_hf_settings(data, kind, read, {name: (x, x) for name, x in ONLY.items() if name in data})
    try:
        asked = read | (usual.keys() - common)
        given = deepcopy({n: value for n, value in data.items() if n in asked})  # it changes them
        return hf_config_class(kind).from_dict(given)
    except Exception as error:  # its checks raise many kinds
        reason = str(error).strip().splitlines()[-1].strip()
        raise ConfigError(f"the model's config.json is wrong: {format_name(reason, 160)}") from None


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


def _tokens(theirs: Any) -> dict[str, Any]:
    """Special tokens: the first of several ends, and all; without padding, the end fills up."""

    def known(name: str) -> list[int]:
        given = getattr(theirs, f"{name}_token_id")
        listed = given if isinstance(given, Sequence) else [given]
        return [token for token in listed if is_token_id(token, theirs.vocab_size)]

    start, ends, pad = map(known, ("bos", "eos", "pad"))
    return {
        "bos_token_id": start[0] if start else None,
        "eos_token_id": ends[0] if ends else 0,
        "eos_token_ids": _joined(sorted({*ends})) if len({*ends}) > 1 else None,
        "pad_token_id": [*pad, *ends, 0][0],
    }


def _layers(kind: str, theirs: Any) -> dict[str, Any]:
    """The types of the layers, as short as they can be, and their window."""
    count, window = theirs.num_hidden_layers, getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None)
    if types is None or ARCHITECTURES[kind].one_window:
        types = [FULL if window is None else SLIDING] * count
    ropes = [int(bool(x)) for x in getattr(theirs, "no_rope_layers", None) or [1] * count]
    if len(types) != count or len(ropes) != count:
        raise ConfigError(
            f"the model's config.json names the types of {len(types)} and {len(ropes)} layers, but "
            f"must name those of all {count}"
        )
    return {
        "layer_types": _joined(_period(types)),
        "sliding_window": window if SLIDING in types else None,
        "no_rope_layers": None if all(ropes) else _joined(_period(ropes)),
    }


def _period(values: list[Any]) -> list[Any]:
    """The fewest values that, repeated, are these."""
    count = len(values)
    return next(values[:n] for n in range(1, count + 1) if (values[:n] * count)[:count] == values)


def _rope(kind: str, theirs: Any) -> dict[str, Any]:
    given, local = dict(theirs.rope_parameters), None
    if ARCHITECTURES[kind].two_angles:
        near = given[SLIDING]
        if near.get("rope_type", "default") != "default":
            raise ConfigError(
                "the model's config.json scales the positions of layers with a window "
                f"({format_value(near)}), which is not known"
            )
        given, local = dict(given[FULL]), near["rope_theta"]
        given.pop("truncate", None)  # transformers asks it only where all angles are alike
    name = given.setdefault("rope_type", "default")
    if name not in ROPE_TYPES:
        raise ConfigError(
            f"the model's config.json has the rope_type {format_value(name)}, but there are: "
            f"{', '.join(ROPE_TYPES)}"
        )
    read = {"rope_type", "rope_theta", "partial_rotary_factor", *sum(ROPE_TYPES[name], ())}
    passed = {"type", "original_max_position_embeddings"}
    if kind == "ministral3":
        read, passed = read | {BETA}, passed | {"max_position_embeddings"}
    unknown = [n for n in given if n not in read | passed and not n.startswith("_")]
    if unknown:
        raise ConfigError(
            f"the model's config.json has {format_names(unknown)} among the settings of the "
            f"rope_type {name}, which is not known there"
        )
    found = {n: value for n, value in given.items() if n in read and value is not None}
    if name == "yarn" and "factor" not in found:
        found["factor"] = theirs.max_position_embeddings / found["original_max_position_embeddings"]
    found |= {n: _joined(map(float, found[n])) for n in LISTS if n in found}
    return {"rope_parameters": found, "rope_local_base_freq": local}


def _joined(values: Iterable[Any]) -> str:
    return ",".join(map(str, values))


# ---- to config.json -----------------------------------------------------------------------------
def to_config_json(config: LlamaConfig) -> dict[str, Any]:
    """Hugging Face's configuration of the model, with rotary positions written in both ways.

    Raises:
        ConfigError: there is no such model of its type.
    """
    model, architecture = config.model, ARCHITECTURES[config.model.model_type]
    known, _ = hf_defaults(model.model_type)
    values = {architecture.names.get(name, name): getattr(model, name) for name in SETTINGS}
    ends, windows = model.further_ends, [layer.is_sliding for layer in model.layers]
    values |= {
        "output_router_logits": model.router_aux_loss_coef > 0,
        "sliding_window": model.sliding_window,
        "use_sliding_window": any(windows),
        "layer_types": [SLIDING if window else FULL for window in windows],
        "no_rope_layers": [int(layer.has_rope) for layer in model.layers],
    }
    if not model.router_aux_loss_coef:
        del values["router_aux_loss_coef"]
    hf_config = {
        "model_type": model.model_type,
        "architectures": [architecture.cls],
        **{name: value for name, value in values.items() if name in known},
        "attention_dropout": model.dropout_prob,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": [model.eos_token_id, *ends] if ends else model.eos_token_id,
        "pad_token_id": model.pad_token_id,
        **_positions(model, known),
    }
    if "head_dim" in known or model.head_dim * model.num_attention_heads != model.hidden_size:
        hf_config["head_dim"] = model.head_dim
    _check_same(model, hf_config)
    return hf_config


def _positions(model: LlamaModel, known: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions."""
    rope, local = model.rope_parameters, model.rope_local_base_freq
    parameters = _parameters(rope)
    settings: dict[str, Any] = {
        "rope_theta": rope.rope_theta,
        "rope_scaling": None if rope.rope_type == "default" else parameters,
    }
    parameters = {"rope_theta": rope.rope_theta, **parameters}
    if rope.partial_rotary_factor != 1:
        fraction = {"partial_rotary_factor": rope.partial_rotary_factor}
        settings, parameters = settings | fraction, parameters | fraction
    if "original_max_position_embeddings" in known:
        original = rope.original_max_position_embeddings or model.max_position_embeddings
        settings["original_max_position_embeddings"] = original
    if local is not None:
        if "rope_local_base_freq" in ARCHITECTURES[model.model_type].former:
            settings["rope_local_base_freq"] = local
        parameters = {SLIDING: {"rope_type": "default", "rope_theta": local}, FULL: parameters}
    return settings | {"rope_parameters": parameters}


def _parameters(rope: LlamaRope) -> dict[str, Any]:
    """How rotary positions are scaled."""
    needed, others = ROPE_TYPES[rope.rope_type]
    values = rope.to_dict() | {name: list(factors(getattr(rope, name))) for name in LISTS}
    values |= {"truncate": None if rope.truncate else False}
    names = ("rope_type", *needed, *others, BETA)
    return {name: values[name] for name in names if values[name] is not None}


def _check_same(model: LlamaModel, hf_config: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a description says all of what the model does."""
    said = _read_again(model, hf_config)
    ours, theirs = _comparable(model), _comparable(said)
    name = next((n for n in ours if ours[n] != theirs[n]), None)
    if name is not None:
        own, expected = (flattened(each.to_dict())[name] for each in (model, said))
        raise ConfigError(
            f"the configuration has model.{name} {format_value(own)}, but a model of "
            f"model.model_type {model.model_type} has {format_value(expected)}"
        )


def _read_again(model: LlamaModel, hf_config: Mapping[str, Any]) -> LlamaModel:
    """The model with what a description says of it."""
    return LlamaModel.from_dict(
        model.to_dict() | from_config_json(JsonObject(dict(hf_config), "config.json"))
    )


def _comparable(model: LlamaModel) -> dict[str, Any]:
    """Values of fields, alike where they mean the same."""
    rope = model.rope_parameters
    return flattened(model.to_dict()) | {
        "layer_types": [layer.is_sliding for layer in model.layers],
        "no_rope_layers": [layer.has_rope for layer in model.layers],
        "eos_token_ids": {model.eos_token_id, *model.further_ends},
        **{f"rope_parameters.{name}": factors(getattr(rope, name)) for name in LISTS},
    }


def normalize_config_json(config: LlamaConfig, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """A description of a model as `to_config_json` writes it, whichever dialect it is in."""
    return to_config_json(replace(config, model=_read_again(config.model, hf_config)))
