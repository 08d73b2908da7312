"""Conversion between the config.json of T5, mT5 or umT5 and our configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from config.errors import ConfigError
from config.t5 import T5Config, T5Model
from files.formatting import format_value
from files.json_files import JsonObject
from modelling.config_json import check_hf_settings, read_token_id

CLASSES = {
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
}
"""transformers' class of each model type."""

FEED_FORWARD_TYPES = {
    "gated-gelu": (True, "gelu_tanh"),  # whatever its name says
    "gated-gelu_new": (True, "gelu_tanh"),
    "gated-relu": (True, "relu"),
    "gated-silu": (True, "silu"),
    "gelu_new": (False, "gelu_tanh"),
    "relu": (False, "relu"),
    "silu": (False, "silu"),
}
"""feed_forward_proj: is the layer gated, and its activation."""

READ = {
    "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads",
    "relative_attention_num_buckets", "relative_attention_max_distance", "layer_norm_epsilon",
    "feed_forward_proj", "dense_act_fn", "tie_word_embeddings", "scale_decoder_outputs",
    "scalable_attention",  # that biases are in every layer: transformers does so in every umt5
}  # fmt: skip
"""Settings that are read here."""


# ---- to config.json -----------------------------------------------------------------------------
def to_config_json(config: T5Config) -> dict[str, Any]:
    """Returns the content of config.json for a configuration."""
    model, attention = config.model, config.model.attention
    return {
        "model_type": model.architecture,
        "architectures": [CLASSES[model.architecture]],
        "vocab_size": model.embedding.vocab_size,
        "d_model": model.hidden_size,
        "d_kv": attention.d_kv,
        "d_ff": model.d_ff,
        "num_layers": model.layers,
        "num_decoder_layers": model.num_decoder_layers,
        "num_heads": attention.heads,
        "relative_attention_num_buckets": attention.relative_attention_num_buckets,
        "relative_attention_max_distance": attention.relative_attention_max_distance,
        "layer_norm_epsilon": model.layer_norm_epsilon,
        "dropout_rate": model.dropout_prob,
        "feed_forward_proj": _feed_forward_proj((model.is_gated_act, model.activation)),
        **_head_settings(model),
        "decoder_start_token_id": model.pad_token_id,
        "pad_token_id": model.pad_token_id,
        "eos_token_id": model.eos_token_id,
    }


def _head_settings(model: T5Model) -> dict[str, bool]:
    """Returns the settings that describe the LM head in a T5 config.json.

    transformers scales the output of a umt5's decoder if `tie_word_embeddings` is true.
    """
    scaled, tied = model.scale_decoder_outputs, model.embedding.tied
    return {
        "tie_word_embeddings": scaled if model.architecture == "umt5" else tied,
        **({"scale_decoder_outputs": scaled} if model.architecture == "t5" else {}),
    }


def _feed_forward_proj(layer_type: tuple[bool, str]) -> str:
    """Returns config.json's `feed_forward_proj` for (is_gated_act, activation)."""
    return next(name for name, value in FEED_FORWARD_TYPES.items() if value == layer_type)


# ---- from config.json ---------------------------------------------------------------------------
def from_config_json(hf_config: JsonObject) -> dict[str, Any]:
    """Returns the fields of the `model` section that a config.json of `CLASSES` sets.

    transformers 5 writes `tie_word_embeddings` true for every model that it saves, even if the head
    is not tied. So other settings decide if the model is T5 v1.0, whose tied head is scaled; for
    other models the weight files decide (`ModelFamily.infers_tied_head`). In umT5's file it only
    says whether the head's input is scaled, for transformers does that.
    """
    data, layers = hf_config.data, hf_config.get_count("num_layers")
    has_depth = data.get("num_decoder_layers") is not None
    decoder_layers = hf_config.get_count("num_decoder_layers") if has_depth else layers
    model_type = hf_config.get_text("model_type") if "model_type" in hf_config else "t5"
    pad, eos = (read_token_id(hf_config, name, i) for i, name in enumerate(("pad", "eos")))
    gated, activation = _feed_forward_type(model_type, data)
    required = {
        "decoder_start_token_id": (pad, pad),
        "is_gated_act": (gated, gated),
        "is_decoder": (False, False),
        "is_encoder_decoder": (True, True),
    }
    check_hf_settings(data, model_type, READ, required)
    scaled = _scales_decoder_outputs(model_type, data)
    return {
        "architecture": model_type,
        "layers": layers,
        "decoder_layers": None if decoder_layers == layers else decoder_layers,
        "hidden_size": hf_config.get_count("d_model"),
        "d_ff": hf_config.get_count("d_ff"),
        "is_gated_act": gated,
        "activation": activation,
        "scale_decoder_outputs": scaled,
        "layer_norm_epsilon": data.get("layer_norm_epsilon", 1e-6),
        "dropout_prob": data.get("dropout_rate", 0.1),
        "eos_token_id": eos,
        "pad_token_id": pad,
        "embedding": {
            "vocab_size": hf_config.get_count("vocab_size"),
            "tied": scaled and model_type == "t5",
        },
        "attention": {
            "heads": hf_config.get_count("num_heads"),
            "d_kv": hf_config.get_count("d_kv"),
            "relative_attention_num_buckets": data.get("relative_attention_num_buckets", 32),
            "relative_attention_max_distance": data.get("relative_attention_max_distance", 128),
        },
    }


def _feed_forward_type(model_type: str, hf_config: Mapping[str, Any]) -> tuple[bool, str]:
    """Returns (is_gated_act, activation); transformers omits the default of a model type."""
    name = hf_config.get("feed_forward_proj")
    name = ("relu" if model_type == "t5" else "gated-gelu") if name is None else name
    if not isinstance(name, str) or name not in FEED_FORWARD_TYPES:
        raise ConfigError(
            f"the model's config.json has feed_forward_proj {format_value(name)}, but must have "
            f"one of: {', '.join(FEED_FORWARD_TYPES)}"
        )
    default = {"gated-gelu": "gelu_new"}.get(name, name.removeprefix("gated-"))
    required = {"dense_act_fn": (default, default)}
    check_hf_settings(
        {n: hf_config.get(n) for n in required}, f"{model_type} with {name}", (), required
    )
    return FEED_FORWARD_TYPES[name]


def _scales_decoder_outputs(model_type: str, hf_config: Mapping[str, Any]) -> bool:
    """True if the decoder's output is scaled before the head, as transformers reads the file."""
    if model_type == "mt5":
        return False
    value = hf_config.get("scale_decoder_outputs") if model_type == "t5" else None
    if value not in (None, False, True):
        raise ConfigError(
            f"the model's config.json has scale_decoder_outputs {format_value(value)}, but must "
            "have true or false"
        )
    return hf_config.get("tie_word_embeddings") is not False if value is None else bool(value)


def normalize_config_json(config: T5Config, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json with feed-forward and scale of the head made explicit.

    One without a model type is returned as it is.
    """
    model_type = hf_config.get("model_type")
    if model_type not in CLASSES:
        return hf_config
    return hf_config | {
        "feed_forward_proj": _feed_forward_proj(_feed_forward_type(model_type, hf_config)),
        "scale_decoder_outputs": _scales_decoder_outputs(model_type, hf_config),
    }
