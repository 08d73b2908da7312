"""Conversion between GPT-J's config.json and our configuration."""

from __future__ import annotations

from typing import Any

from config.gptj import GPTJConfig
from files.json_files import JsonObject
from modelling.config_json import check_hf_settings, read_token_id

READ = {
    "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "rotary_dim", "layer_norm_epsilon",
}  # fmt: skip


def to_config_json(config: GPTJConfig) -> dict[str, Any]:
    """Returns the content of config.json for a configuration."""
    model = config.model
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout_prob)
    return {
        "model_type": "gptj",
        "architectures": ["GPTJForCausalLM"],
        "vocab_size": model.embedding.vocab_size,
        "n_positions": max(
            model.sequence_length + model.output_length, model.max_position_embeddings
        ),
        "n_embd": model.hidden_size,
        "n_layer": model.layers,
        "n_head": model.attention.heads,
        "rotary_dim": model.attention.rotary_dim,
        "layer_norm_epsilon": model.layer_norm_epsilon,
        "initializer_range": model.initializer_range,
        "activation_function": "gelu_new",
        "tie_word_embeddings": False,
        "bos_token_id": model.eos_token_id,
        "pad_token_id": model.pad_token_id,
        "eos_token_id": model.eos_token_id,
        **dropout,
    }


def from_config_json(hf_config: JsonObject) -> dict[str, Any]:
    """Returns the fields of the `model` section that a config.json sets; raises ConfigError."""
    data = hf_config.data
    hidden = hf_config.get_count("n_embd")
    dropout = data.get("resid_pdrop") or 0.0
    required = {
        "activation_function": ("gelu_new", "gelu_new"),
        "tie_word_embeddings": (False, False),
        "rotary": (True, True),
        "scale_attn_weights": (True, True),
        "embd_pdrop": (dropout, 0.0),
        "attn_pdrop": (dropout, 0.0),
        "n_inner": (4 * hidden if data.get("n_inner") else None, None),
    }
    check_hf_settings(data, "gptj", READ, required)
    fields = {
        "dropout_prob": dropout,
        "layers": hf_config.get_count("n_layer"),
        "hidden_size": hidden,
        "max_position_embeddings": hf_config.get_count("n_positions")
        if "n_positions" in hf_config
        else 2048,
        "layer_norm_epsilon": data.get("layer_norm_epsilon", 1e-5),
        "initializer_range": data.get("initializer_range", 0.02),
        "embedding": {"vocab_size": hf_config.get_count("vocab_size")},
        "attention": {
            "heads": hf_config.get_count("n_head"),
            "rotary_dim": hf_config.get_count("rotary_dim"),
        },
    }
    last_token = fields["embedding"]["vocab_size"] - 1
    fields["eos_token_id"] = read_token_id(hf_config, "eos", min(50256, last_token))
    fields["pad_token_id"] = read_token_id(hf_config, "pad", min(50257, last_token))
    return fields
