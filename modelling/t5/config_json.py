"""The config.json of FLAN-T5, in both directions."""

from __future__ import annotations

from typing import Any

from config.t5 import T5Config
from files.json_files import Fields
from modelling.spec import check_values, token_id


def to_config_json(config: T5Config) -> dict[str, Any]:
    """Hugging Face's configuration of the model."""
    model, attention = config.model, config.model.attention
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": model.embedding.vocab_size,
        "d_model": model.hidden_size,
        "d_kv": attention.d_kv,
        "d_ff": model.d_ff,
        "num_layers": model.layers,
        "num_decoder_layers": model.layers,
        "num_heads": attention.heads,
        "relative_attention_num_buckets": attention.relative_attention_num_buckets,
        "relative_attention_max_distance": attention.relative_attention_max_distance,
        "layer_norm_epsilon": model.layer_norm_epsilon,
        "dropout_rate": model.dropout_prob,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "scale_decoder_outputs": False,
        "decoder_start_token_id": model.pad_token,
        "pad_token_id": model.pad_token,
        "eos_token_id": model.end_token,
    }


def from_config_json(description: Fields) -> dict[str, Any]:
    """Fields of the model section for a config.json of T5 v1.1 or FLAN-T5."""
    data, layers = description.data, description.count("num_layers")
    pad, end = (token_id(description, name, i) for i, name in enumerate(("pad", "eos")))
    # Whether the head is tied to the embedding is seen from the weights: transformers 5 writes
    # `tie_word_embeddings` true for every T5 that it saves, also where the two differ.
    tied = data.get("tie_word_embeddings") is not False
    needed = {
        "scale_decoder_outputs": (False, tied),  # as transformers reads older files
        "is_gated_act": (True, True),
        "dense_act_fn": ("gelu_new", "gelu_new"),
        "quantization_config": (None, None),
        "feed_forward_proj": ("gated-gelu", "relu"),
        "decoder_start_token_id": (pad, pad),
        "num_decoder_layers": (layers, layers),
    }
    check_values(data, needed, "T5 v1.1 and FLAN-T5 are known, T5 of 2019 is not")
    return {
        "layers": layers,
        "hidden_size": description.count("d_model"),
        "d_ff": description.count("d_ff"),
        "layer_norm_epsilon": data.get("layer_norm_epsilon", 1e-6),
        "dropout_prob": data.get("dropout_rate", 0.1),
        "end_token": end,
        "pad_token": pad,
        "embedding": {"vocab_size": description.count("vocab_size")},
        "attention": {
            "heads": description.count("num_heads"),
            "d_kv": description.count("d_kv"),
            "relative_attention_num_buckets": data.get("relative_attention_num_buckets", 32),
            "relative_attention_max_distance": data.get("relative_attention_max_distance", 128),
        },
    }
