"""Conversion between config.json of Llama-like models and our configuration.

transformers' classes fill in defaults, and read both ways of writing RoPE settings:
`rope_parameters`, and `rope_theta` with `rope_scaling`, as before transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

from config.base import flatten_by_path
from config.errors import ConfigError
from config.llama import FULL, MIXTURES, ROPE_TYPES, SLIDING, LlamaConfig, LlamaModel, LlamaRope
from config.values import parse_numbers
from files.formatting import format_name, format_names, format_value
from files.json_files import JsonObject
from modelling.config_json import check_hf_settings, hf_config_class, hf_defaults, is_token_id

_ACTIVATION = {"hidden_act": "hidden_activation"}
_LOCAL_EXPERTS = {"num_experts": "num_local_experts"}
_GEMMA3_LEGACY = frozenset(("rope_local_base_freq", "sliding_window_pattern"))


class Architecture(NamedTuple):
    """Differences between one model type's config.json and our `model` section.

    Attributes:
        cls: transformers' class.
        names: settings with another name than ours: our name -> its name.
        legacy: settings of older files, which transformers converts.
        one_layer_type: True if all layers use the sliding window, if there is one.
        has_local_rope: True if sliding-window layers have a RoPE base of their own.
    """

    cls: str
    names: Mapping[str, str] = {}
    legacy: frozenset[str] = frozenset()
    one_layer_type: bool = False
    has_local_rope: bool = False


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM"),
    "mistral": Architecture("MistralForCausalLM", one_layer_type=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "phi3": Architecture("Phi3ForCausalLM", one_layer_type=True),
    "gemma2": Architecture("Gemma2ForCausalLM", _ACTIVATION),
    "gemma3_text": Architecture(
        "Gemma3ForCausalLM", _ACTIVATION, _GEMMA3_LEGACY, has_local_rope=True
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM"),
    "olmo2": Architecture("Olmo2ForCausalLM"),
    "granite": Architecture("GraniteForCausalLM"),
    "ministral3": Architecture("Ministral3ForCausalLM", one_layer_type=True),
    "olmo3": Architecture("Olmo3ForCausalLM", has_local_rope=True),
    "mixtral": Architecture("MixtralForCausalLM", _LOCAL_EXPERTS, one_layer_type=True),
    "qwen2_moe": Architecture("Qwen2MoeForCausalLM", {"attention_bias": "qkv_bias"}),
    "qwen3_moe": Architecture("Qwen3MoeForCausalLM", _LOCAL_EXPERTS, one_layer_type=True),
    "olmoe": Architecture("OlmoeForCausalLM"),
    "gpt_oss": Architecture("GptOssForCausalLM", _LOCAL_EXPERTS),
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
"""Fields with the value of the setting of the same name, if a model type has it."""

READ = {
    *SETTINGS, "layer_types", "sliding_window", "use_sliding_window", "no_rope_layers",
    "bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits",
    "original_max_position_embeddings",
}  # fmt: skip
"""Settings that are read if a model type has them."""

READ_ALWAYS = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "head_dim"}
"""Settings that are read for all model types, even if their classes do not name them."""

NEUTRAL_VALUES = {"full_attn_mod": 1, "interpolate_factor": 1}
"""Settings of Phi-4-mini's files that transformers does not have, and their value without
effect."""

BETA = "llama_4_scaling_beta"
FACTOR_LISTS = ("short_factor", "long_factor")


# ---- from config.json ---------------------------------------------------------------------------
def from_config_json(hf_config: JsonObject) -> dict[str, Any]:
    """Returns the fields of the `model` section that a config.json sets.

    Raises:
        ConfigError: a setting is unknown, or has a value that is not supported.
    """
    model_type = hf_config.get_text("model_type")
    hf = _load_hf_config(model_type, hf_config.data)
    names = ARCHITECTURES[model_type].names
    fields: dict[str, Any] = {"model_type": model_type}
    for name in SETTINGS:
        value = getattr(hf, names.get(name, name), None)
        fields[name] = getattr(LlamaModel, name) if value is None else value
    heads = fields["num_attention_heads"]
    fields["num_key_value_heads"] = hf.num_key_value_heads or heads
    fields["head_dim"] = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    if not getattr(hf, "output_router_logits", False):
        fields["router_aux_loss_coef"] = 0.0
    rope = read_rope_settings(
        hf, ARCHITECTURES[model_type].has_local_rope, scales_queries=model_type == "ministral3"
    )
    tokens = special_token_ids(hf, hf.vocab_size)
    return fields | tokens | _read_layer_types(model_type, hf) | rope


def _load_hf_config(model_type: str, hf_config: Mapping[str, Any]) -> Any:
    """Loads a config.json as transformers' class, with defaults; raises ConfigError."""
    hf_config, architecture = _modernize_hf_config(model_type, hf_config), ARCHITECTURES[model_type]
    model_defaults, common_names = hf_defaults(model_type)
    read = READ_ALWAYS | architecture.legacy | (READ & model_defaults.keys())
    read |= {*architecture.names.values()}
    read |= {"num_experts", "num_local_experts"} if model_type in MIXTURES else set()
    required = {name: (x, x) for name, x in NEUTRAL_VALUES.items() if name in hf_config}
    check_hf_settings(hf_config, model_type, read, required)
    used = read | (model_defaults.keys() - common_names)
    return load_hf_class(model_type, {name: x for name, x in hf_config.items() if name in used})


def load_hf_class(model_type: str, hf_config: Mapping[str, Any]) -> Any:
    """Loads a config.json's settings as transformers' class; raises ConfigError."""
    try:
        # A copy, since from_dict modifies it.
        return hf_config_class(model_type).from_dict(deepcopy(dict(hf_config)))
    except Exception as error:  # transformers' checks raise several types
        reason = str(error).strip().splitlines()[-1].strip()
        raise ConfigError(f"the model's config.json is wrong: {format_name(reason, 160)}") from None


def _modernize_hf_config(model_type: str, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a config.json written by an older transformers version to the current form.

    LLaMA 1 has -1 for token ids that it lacks. gpt-oss's MXFP4 experts are dequantized on reading
    (`modelling.weights.mxfp4`). The first Phi-3 files call the RoPE type "longrope" "su", whose
    lengths transformers does not check.
    """
    hf_config = {
        n: None if n.endswith("_token_id") and x == -1 else x for n, x in hf_config.items()
    }
    quantization = hf_config.get("quantization_config")
    is_mxfp4 = isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"
    if model_type == "gpt_oss" and is_mxfp4:
        hf_config = {
            name: value for name, value in hf_config.items() if name != "quantization_config"
        }
    scaling = hf_config.get("rope_scaling")
    if model_type == "phi3" and isinstance(scaling, Mapping) and scaling.get("type") == "su":
        return {**hf_config, "rope_scaling": {**scaling, "type": "longrope"}}
    return dict(hf_config)


def special_token_ids(hf_config: Any, vocab_size: int) -> dict[str, Any]:
    """Returns a transformers config's special token ids as fields of the `model` section.

    The first eos token also pads if there is no padding token.
    """

    def read_token_ids(name: str) -> list[int]:
        value = getattr(hf_config, f"{name}_token_id")
        ids = value if isinstance(value, Sequence) else [value]
        return [token_id for token_id in ids if is_token_id(token_id, vocab_size)]

    bos, eos, pad = map(read_token_ids, ("bos", "eos", "pad"))
    return {
        "bos_token_id": bos[0] if bos else None,
        "eos_token_id": eos[0] if eos else 0,
        "eos_token_ids": _join_with_commas(sorted({*eos})) if len({*eos}) > 1 else None,
        "pad_token_id": [*pad, *eos, 0][0],
    }


def _read_layer_types(model_type: str, hf_config: Any) -> dict[str, Any]:
    """Returns the repeating pattern of layer types, the window, and the layers without RoPE."""
    count, window = hf_config.num_hidden_layers, getattr(hf_config, "sliding_window", None)
    types = getattr(hf_config, "layer_types", None)
    if types is None or ARCHITECTURES[model_type].one_layer_type:
        types = [FULL if window is None else SLIDING] * count
    ropes = [int(bool(x)) for x in getattr(hf_config, "no_rope_layers", None) or [1] * count]
    if len(types) != count or len(ropes) != count:
        raise ConfigError(
            f"the model's config.json names the types of {len(types)} and {len(ropes)} layers, but "
            f"must name those of all {count}"
        )
    return {
        "layer_types": _join_with_commas(shortest_period(types)),
        "sliding_window": window if SLIDING in types else None,
        "no_rope_layers": None if all(ropes) else _join_with_commas(shortest_period(ropes)),
    }


def shortest_period(values: list[Any]) -> list[Any]:
    """Returns the shortest prefix of `values` that, repeated and cut to length, equals `values`."""
    count = len(values)
    return next(values[:n] for n in range(1, count + 1) if (values[:n] * count)[:count] == values)


def read_rope_settings(
    hf_config: Any, has_local_rope: bool = False, scales_queries: bool = False
) -> dict[str, Any]:
    """Returns the RoPE settings of a transformers config as fields of the `model` section.

    Args:
        has_local_rope: True if sliding-window layers have a RoPE base of their own.
        scales_queries: True if models of the type can scale queries by position.
    """
    parameters, local_theta = dict(hf_config.rope_parameters), None
    if has_local_rope:
        local = parameters[SLIDING]
        if local.get("rope_type", "default") != "default":
            raise ConfigError(
                "the model's config.json scales the positions of layers with a window "
                f"({format_value(local)}), which is not known"
            )
        parameters, local_theta = dict(parameters[FULL]), local["rope_theta"]
        parameters.pop("truncate", None)  # transformers reads it only for a single RoPE
    rope_type = parameters.setdefault("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"the model's config.json has the rope_type {format_value(rope_type)}, but there are: "
            f"{', '.join(ROPE_TYPES)}"
        )
    read = {"rope_type", "rope_theta", "partial_rotary_factor", *sum(ROPE_TYPES[rope_type], ())}
    ignored = {"type", "original_max_position_embeddings"}
    if scales_queries:
        read, ignored = read | {BETA}, ignored | {"max_position_embeddings"}
    unknown = [n for n in parameters if n not in read | ignored and not n.startswith("_")]
    if unknown:
        raise ConfigError(
            f"the model's config.json has {format_names(unknown)} among the settings of the "
            f"rope_type {rope_type}, which is not known there"
        )
    rope = {n: value for n, value in parameters.items() if n in read and value is not None}
    if rope_type == "yarn" and "factor" not in rope:
        rope["factor"] = (
            hf_config.max_position_embeddings / rope["original_max_position_embeddings"]
        )
    rope |= {n: _join_with_commas(map(float, rope[n])) for n in FACTOR_LISTS if n in rope}
    return {"rope_parameters": rope, "rope_local_base_freq": local_theta}


def _join_with_commas(values: Iterable[Any]) -> str:
    return ",".join(map(str, values))


# ---- to config.json -----------------------------------------------------------------------------
def to_config_json(config: LlamaConfig) -> dict[str, Any]:
    """Returns the content of config.json, with RoPE settings in the old and the new form.

    Raises:
        ConfigError: models of this type cannot have the configuration.
    """
    model, architecture = config.model, ARCHITECTURES[config.model.model_type]
    hf_names, _ = hf_defaults(model.model_type)
    values = {architecture.names.get(name, name): getattr(model, name) for name in SETTINGS}
    further_eos = model.extra_eos_token_ids
    is_sliding = [layer.is_sliding for layer in model.layers]
    values |= {
        "output_router_logits": model.router_aux_loss_coef > 0,
        "sliding_window": model.sliding_window,
        "use_sliding_window": any(is_sliding),
        "layer_types": [SLIDING if sliding else FULL for sliding in is_sliding],
        "no_rope_layers": [int(layer.has_rope) for layer in model.layers],
    }
    if not model.router_aux_loss_coef:
        del values["router_aux_loss_coef"]
    hf_config = {
        "model_type": model.model_type,
        "architectures": [architecture.cls],
        **{name: value for name, value in values.items() if name in hf_names},
        "attention_dropout": model.dropout_prob,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": [model.eos_token_id, *further_eos] if further_eos else model.eos_token_id,
        "pad_token_id": model.pad_token_id,
        **_hf_rope_settings(model, hf_names),
    }
    if "head_dim" in hf_names or model.head_dim * model.num_attention_heads != model.hidden_size:
        hf_config["head_dim"] = model.head_dim
    _check_round_trip(model, hf_config)
    return hf_config


def _hf_rope_settings(model: LlamaModel, hf_names: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the RoPE settings of config.json, in the old and the new form."""
    rope, local_theta = model.rope_parameters, model.rope_local_base_freq
    settings: dict[str, Any] = {
        "rope_theta": rope.rope_theta,
        "rope_scaling": None if rope.rope_type == "default" else _hf_rope_scaling(rope),
    }
    if rope.partial_rotary_factor != 1:
        settings["partial_rotary_factor"] = rope.partial_rotary_factor
    if "original_max_position_embeddings" in hf_names:
        original = rope.original_max_position_embeddings or model.max_position_embeddings
        settings["original_max_position_embeddings"] = original
    if local_theta is not None and "rope_local_base_freq" in ARCHITECTURES[model.model_type].legacy:
        settings["rope_local_base_freq"] = local_theta
    return settings | {"rope_parameters": hf_rope_parameters(rope, local_theta)}


def hf_rope_parameters(rope: LlamaRope, local_theta: float | None) -> dict[str, Any]:
    """Returns `rope_parameters` of config.json; with `local_theta`, one set per layer type."""
    parameters = {"rope_theta": rope.rope_theta, **_hf_rope_scaling(rope)}
    if rope.partial_rotary_factor != 1:
        parameters["partial_rotary_factor"] = rope.partial_rotary_factor
    if local_theta is None:
        return parameters
    return {SLIDING: {"rope_type": "default", "rope_theta": local_theta}, FULL: parameters}


def _hf_rope_scaling(rope: LlamaRope) -> dict[str, Any]:
    """Returns the RoPE scaling settings of config.json, without theta."""
    required, optional = ROPE_TYPES[rope.rope_type]
    values = rope.to_dict() | {
        name: list(parse_numbers(getattr(rope, name))) for name in FACTOR_LISTS
    }
    values |= {"truncate": None if rope.truncate else False}
    names = ("rope_type", *required, *optional, BETA)
    return {name: values[name] for name in names if values[name] is not None}


def _check_round_trip(model: LlamaModel, hf_config: Mapping[str, Any]) -> None:
    """Raises ConfigError unless reading back the written config.json gives an equivalent model."""
    restored = _update_model_from_hf(model, hf_config)
    before, after = _canonical_fields(model), _canonical_fields(restored)
    name = next((n for n in before if before[n] != after[n]), None)
    if name is not None:
        value, expected = (flatten_by_path(m.to_dict())[name] for m in (model, restored))
        raise ConfigError(
            f"the configuration has model.{name} {format_value(value)}, but a model of "
            f"model.model_type {model.model_type} has {format_value(expected)}"
        )


def _update_model_from_hf(model: LlamaModel, hf_config: Mapping[str, Any]) -> LlamaModel:
    """Returns the `model` section updated by the fields that a config.json sets."""
    return LlamaModel.from_dict(
        model.to_dict() | from_config_json(JsonObject(dict(hf_config), "config.json"))
    )


def _canonical_fields(model: LlamaModel) -> dict[str, Any]:
    """Returns the fields of a `model` section in a form that is equal for equivalent settings."""
    rope = model.rope_parameters
    return flatten_by_path(model.to_dict()) | {
        "layer_types": [layer.is_sliding for layer in model.layers],
        "no_rope_layers": [layer.has_rope for layer in model.layers],
        "eos_token_ids": {model.eos_token_id, *model.extra_eos_token_ids},
        **{f"rope_parameters.{name}": parse_numbers(getattr(rope, name)) for name in FACTOR_LISTS},
    }


def normalize_config_json(config: LlamaConfig, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json of any version in the form that `to_config_json` writes."""
    return to_config_json(replace(config, model=_update_model_from_hf(config.model, hf_config)))
