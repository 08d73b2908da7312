"""Conversion between config.json of BART or a relative and our configuration."""

from __future__ import annotations

from typing import Any

from config.bart import BartConfig, BartModel
from config.errors import ConfigError
from files.formatting import format_value
from files.json_files import JsonObject
from modelling.bart.architectures import ARCHITECTURES
from modelling.config_json import check_hf_settings, hf_defaults, is_token_id, read_token_id

SHARED = (
    "vocab_size", "encoder_layers", "decoder_layers", "encoder_attention_heads",
    "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "activation_function",
    "attention_dropout", "activation_dropout", "max_position_embeddings", "init_std",
    "scale_embedding", "encoder_layerdrop", "decoder_layerdrop", "bos_token_id", "pad_token_id",
    "eos_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id",
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
        "model_type": model.model_type,
        "architectures": [ARCHITECTURES[model.model_type].cls],
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        **{name: getattr(model, name) for name in SHARED},
        **{name: getattr(model, own_name) for name, own_name in RENAMED.items()},
        **(_vocabulary_settings(model) if model.model_type == "marian" else {}),
    }


def _vocabulary_settings(model: BartModel) -> dict[str, Any]:
    """Returns Marian's settings of one vocabulary, or two."""
    return {
        "decoder_vocab_size": model.output_vocab_size,
        "share_encoder_decoder_embeddings": model.decoder_vocab_size is None,
    }


def from_config_json(hf_config: JsonObject) -> dict[str, Any]:
    """Returns the fields of the `model` section that a config.json sets; raises ConfigError."""
    data, model_type = hf_config.data, hf_config.get_text("model_type")
    defaults, architecture = hf_defaults(model_type)[0], ARCHITECTURES[model_type]
    is_pre_norm, is_learned = architecture.is_pre_norm, architecture.positions == "learned"
    expected = {
        "is_encoder_decoder": True,
        "is_decoder": False,
        "tie_word_embeddings": True,
        "normalize_before": is_pre_norm,
        "add_final_layer_norm": is_pre_norm,
        "normalize_embedding": architecture.has_embedding_norm,
        "add_bias_logits": False,
        "static_position_embeddings": not is_learned,
    }
    # `num_hidden_layers` is what transformers calls `encoder_layers` too.
    read = {*SHARED, *RENAMED, "num_hidden_layers", "extra_pos_embeddings"}
    if model_type == "marian":
        read |= {"decoder_vocab_size", "share_encoder_decoder_embeddings"}
    check_hf_settings(data, model_type, read, {n: (value, value) for n, value in expected.items()})
    count_suffixes = ("layers", "heads", "dim", "model", "size")
    counts = [name for name in (*SHARED, *RENAMED) if name.endswith(count_suffixes)]
    values = {name: data.get(name, defaults.get(name)) for name in (*SHARED, *RENAMED)}
    values |= {name: hf_config.get_count(name) for name in counts if data.get(name) is not None}
    for name in ("pad", "eos"):
        values[f"{name}_token_id"] = read_token_id(hf_config, name, defaults[f"{name}_token_id"])
    for name in FORCED_TOKENS:
        values[name] = _forced_token_id(hf_config, name, defaults.get(name))
    values["model_type"] = model_type
    if model_type == "marian":
        values["decoder_vocab_size"] = _decoder_vocab_size(hf_config)
    if values["decoder_start_token_id"] is None:  # as transformers' `generate` does
        values["decoder_start_token_id"] = values["bos_token_id"]
    act = values["activation_function"] = _canonical_activation(values["activation_function"])
    if act not in ACTIVATIONS:
        raise ConfigError(
            f"the model's config.json has activation_function {format_value(act)}, but must have "
            f"one of: {', '.join(ACTIVATIONS)}"
        )
    return {RENAMED.get(name, name): value for name, value in values.items()}


def _decoder_vocab_size(hf_config: JsonObject) -> int | None:
    """Returns the rows of the decoder's own embedding; None if there is one embedding for both."""
    given = hf_config.data.get("decoder_vocab_size")
    rows = hf_config.get_count("vocab_size")
    count = rows if given is None else hf_config.get_count("decoder_vocab_size")
    shared = hf_config.data.get("share_encoder_decoder_embeddings", True)
    if not isinstance(shared, bool):
        raise hf_config.error("share_encoder_decoder_embeddings", "true or false")
    if shared and count != rows:
        raise ConfigError(
            f"the model's config.json has decoder_vocab_size {count} and vocab_size {rows}, but "
            "share_encoder_decoder_embeddings is true: both must be equal"
        )
    return None if shared else count


def normalize_config_json(config: BartConfig, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json with the activation function under its canonical name."""
    name = "activation_function"
    return hf_config | ({name: _canonical_activation(hf_config[name])} if name in hf_config else {})


def _canonical_activation(name: Any) -> Any:
    return ACTIVATION_ALIASES.get(name, name) if isinstance(name, str) else name


def _forced_token_id(hf_config: JsonObject, name: str, default: int | None) -> int | None:
    """Returns a forced start or end token id, the first of several; None if none is set."""
    value: Any = hf_config.data.get(name, default)
    if isinstance(value, list) and value:
        value = value[0]
    if value is not None and not is_token_id(value, hf_config.get_count("vocab_size")):
        raise hf_config.error(name, "a token id or null")
    return value
