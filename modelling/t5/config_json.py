"""The config.json of T5 and mT5, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from config.errors import ConfigError
from config.t5 import T5Config, T5Model
from files.formatting import format_value
from files.json_files import JsonObject
from modelling.config_json import check_hf_settings, read_token_id

CLASSES = {"t5": "T5ForConditionalGeneration", "mt5": "MT5ForConditionalGeneration"}
"""The class of transformers that a model of an architecture is."""

FEED_FORWARDS = {
    "gated-gelu": (True, "gelu_tanh"),  # in spite of its name
    "gated-gelu_new": (True, "gelu_tanh"),
    "gated-relu": (True, "relu"),
    "gated-silu": (True, "silu"),
    "gelu_new": (False, "gelu_tanh"),
    "relu": (False, "relu"),
    "silu": (False, "silu"),
}
"""Hugging Face's names of feed-forward layers: whether they are gated, and the activation."""

READ = {
    "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads",
    "relative_attention_num_buckets", "relative_attention_max_distance", "layer_norm_epsilon",
    "feed_forward_proj", "dense_act_fn", "tie_word_embeddings", "scale_decoder_outputs",
}  # fmt: skip
"""Settings that are read, and checked by name."""


# ---- to config.json -----------------------------------------------------------------------------
def to_config_json(config: T5Config) -> dict[str, Any]:
    """Hugging Face's configuration of the model."""
    model, attention = config.model, config.model.attention
    return {
        "model_type": model.architecture,
        "architectures": [CLASSES[model.architecture]],
        "vocab_size": model.embedding.vocab_size,
        "d_model": model.hidden_size,
        "d_kv": attention.d_kv,
        "d_ff": model.d_ff,
        "num_layers": model.layers,
        "num_decoder_layers": model.decoder_depth,
        "num_heads": attention.heads,
        "relative_attention_num_buckets": attention.relative_attention_num_buckets,
        "relative_attention_max_distance": attention.relative_attention_max_distance,
        "layer_norm_epsilon": model.layer_norm_epsilon,
        "dropout_rate": model.dropout_prob,
        "feed_forward_proj": _feed_forward(model),
        "tie_word_embeddings": model.embedding.tied,
        **(
            {"scale_decoder_outputs": model.scale_decoder_outputs}
            if model.architecture == "t5"
            else {}
        ),
        "decoder_start_token_id": model.pad_token_id,
        "pad_token_id": model.pad_token_id,
        "eos_token_id": model.eos_token_id,
    }


def _feed_forward(model: T5Model) -> str:
    """The first of Hugging Face's names of the model's feed-forward layers."""
    ours = (model.is_gated_act, model.activation)
    return next(name for name, maps in FEED_FORWARDS.items() if maps == ours)


# ---- from config.json ---------------------------------------------------------------------------
def from_config_json(hf_config: JsonObject) -> dict[str, Any]:
    """Fields of the model section for a config.json of T5, T5 v1.1, FLAN-T5 or mT5.

    transformers 5 writes `tie_word_embeddings` true for all that it saves, also where head and
    embedding differ. So what else is written decides whether the model is one of 2019, whose head
    is the embedding, scaled. Whether it is that of another model, its files say
    (`ModelFamily.infers_tied_head`).
    """
    data, layers = hf_config.data, hf_config.count("num_layers")
    there = data.get("num_decoder_layers") is not None
    decoder = hf_config.count("num_decoder_layers") if there else layers
    kind = hf_config.text("model_type") if "model_type" in hf_config else "t5"
    pad, end = (read_token_id(hf_config, name, i) for i, name in enumerate(("pad", "eos")))
    gated, activation = _maps(kind, data)
    needed = {
        "decoder_start_token_id": (pad, pad),
        "is_gated_act": (gated, gated),
        "is_decoder": (False, False),
        "is_encoder_decoder": (True, True),
    }
    check_hf_settings(data, kind, READ, needed)
    scaled = _scaled(data) if kind == "t5" else False
    return {
        "architecture": kind,
        "layers": layers,
        "decoder_layers": None if decoder == layers else decoder,
        "hidden_size": hf_config.count("d_model"),
        "d_ff": hf_config.count("d_ff"),
        "is_gated_act": gated,
        "activation": activation,
        "scale_decoder_outputs": scaled,
        "layer_norm_epsilon": data.get("layer_norm_epsilon", 1e-6),
        "dropout_prob": data.get("dropout_rate", 0.1),
        "eos_token_id": end,
        "pad_token_id": pad,
        "embedding": {"vocab_size": hf_config.count("vocab_size"), "tied": scaled},
        "attention": {
            "heads": hf_config.count("num_heads"),
            "d_kv": hf_config.count("d_kv"),
            "relative_attention_num_buckets": data.get("relative_attention_num_buckets", 32),
            "relative_attention_max_distance": data.get("relative_attention_max_distance", 128),
        },
    }


def _maps(kind: str, data: Mapping[str, Any]) -> tuple[bool, str]:
    """What the feed-forward layers are; transformers leaves out what is usual for a kind."""
    name = data.get("feed_forward_proj")
    name = {"t5": "relu", "mt5": "gated-gelu"}[kind] if name is None else name
    if not isinstance(name, str) or name not in FEED_FORWARDS:
        raise ConfigError(
            f"the model's config.json has feed_forward_proj {format_value(name)}, but must have "
            f"one of: {', '.join(FEED_FORWARDS)}"
        )
    usual = {"gated-gelu": "gelu_new"}.get(name, name.removeprefix("gated-"))
    needed = {"dense_act_fn": (usual, usual)}
    check_hf_settings({n: data.get(n) for n in needed}, f"{kind} with {name}", (), needed)
    return FEED_FORWARDS[name]


def _scaled(data: Mapping[str, Any]) -> bool:
    """Whether the decoder's output is scaled: as transformers reads files, old and new."""
    said = data.get("scale_decoder_outputs")
    if said not in (None, False, True):
        raise ConfigError(
            f"the model's config.json has scale_decoder_outputs {format_value(said)}, but must "
            "have true or false"
        )
    return data.get("tie_word_embeddings") is not False if said is None else bool(said)


def normalize_config_json(config: T5Config, hf_config: dict[str, Any]) -> dict[str, Any]:
    """A description with what its layers and head follow from, where it leaves that out.

    One that does not name its architecture says nothing of them.
    """
    kind = hf_config.get("model_type")
    if kind not in CLASSES:
        return hf_config
    gated, activation = _maps(kind, hf_config)
    feed_forward = next(name for name, maps in FEED_FORWARDS.items() if maps == (gated, activation))
    scaled = {"scale_decoder_outputs": _scaled(hf_config)} if kind == "t5" else {}
    return hf_config | {"feed_forward_proj": feed_forward} | scaled
