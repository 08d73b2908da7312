"""Conversion between BART's config.json and our configuration."""

from __future__ import annotations

from typing import Any

from config.bart import BartConfig
from config.errors import ConfigError
from files.formatting import format_value
from files.json_files import JsonObject
from modelling.config_json import check_hf_settings, hf_defaults, is_token_id, read_token_id

SHARED = (
    "vocab_size", "encoder_layers", "decoder_layers", "encoder_attention_heads",
    "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "activation_function",
    "attention_dropout", "activation_dropout", "max_position_embeddings", "init_std",
    "scale_embedding", "bos_token_id",
    "pad_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id",
)  # fmt: skip
"""Settings with the same names and values in our configuration."""
RENAMED = {"d_model": "hidden_size", "dropout": "dropout_prob"}
"""Settings with other names in our configuration."""

FORCED_TOKENS = ("forced_bos_token_id", "forced_eos_token_id")
ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu")
ACTIVATION_ALIASES = {"swish": "silu", "gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new"}
"""Further names of transformers for these activations."""


def to_config_json(config: BartConfig) -> dict[str, Any]:
    """Returns the content of config.json for a configuration."""
    model = config.model
    return {
        "model_type": "bart",
        "architectures": ["BartForConditionalGeneration"],
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        **{name: getattr(model, name) for name in SHARED},
        **{name: getattr(model, own_name) for name, own_name in RENAMED.items()},
    }


def from_config_json(hf_config: JsonObject) -> dict[str, Any]:
    """Returns the fields of the `model` section that a config.json sets; raises ConfigError."""
    data, (model_defaults, _) = hf_config.data, hf_defaults("bart")
    required = {
        "is_encoder_decoder": (True, True),
        "is_decoder": (False, False),
        "tie_word_embeddings": (True, True),
        "normalize_before": (False, False),
        "add_final_layer_norm": (False, False),
        "normalize_embedding": (True, True),
        "add_bias_logits": (False, False),
        "static_position_embeddings": (False, False),
        "encoder_layerdrop": (0.0, 0.0),
        "decoder_layerdrop": (0.0, 0.0),
    }
    # `num_hidden_layers` is what transformers calls `encoder_layers` too.
    read = {*SHARED, *RENAMED, "num_hidden_layers"}
    check_hf_settings(data, "bart", read, required)
    count_suffixes = ("layers", "heads", "dim", "model", "size")
    counts = [name for name in (*SHARED, *RENAMED) if name.endswith(count_suffixes)]
    values = {name: data.get(name, model_defaults.get(name)) for name in (*SHARED, *RENAMED)}
    values |= {name: hf_config.count(name) for name in counts if data.get(name) is not None}
    for name in ("pad", "eos"):
        values[f"{name}_token_id"] = read_token_id(
            hf_config, name, model_defaults[f"{name}_token_id"]
        )
    values |= {name: _forced_token_id(hf_config, name) for name in FORCED_TOKENS}
    act = values["activation_function"] = _canonical_activation(values["activation_function"])
    if act not in ACTIVATIONS:
        raise ConfigError(
            f"the model's config.json has activation_function {format_value(act)}, but must have "
            f"one of: {', '.join(ACTIVATIONS)}"
        )
    return {RENAMED.get(name, name): value for name, value in values.items()}


def normalize_config_json(config: BartConfig, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json with the activation function under its canonical name."""
    name = "activation_function"
    return hf_config | ({name: _canonical_activation(hf_config[name])} if name in hf_config else {})


def _canonical_activation(name: Any) -> Any:
    return ACTIVATION_ALIASES.get(name, name) if isinstance(name, str) else name


def _forced_token_id(hf_config: JsonObject, name: str) -> int | None:
    """Returns a forced start or end token id, the first of several; None if none is set."""
    value: Any = hf_config.data.get(name, 2 if name == "forced_eos_token_id" else None)
    if isinstance(value, list) and value:
        value = value[0]
    if value is not None and not is_token_id(value, hf_config.count("vocab_size")):
        raise hf_config.error(name, "a token id or null")
    return value
