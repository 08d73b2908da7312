"""Conversion between T5Gemma's config.json, with a section for each stack, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from config.errors import ConfigError
from config.llama import FULL, SLIDING
from config.t5gemma import STACKS, GemmaStack, T5GemmaConfig, T5GemmaModel
from files.formatting import format_value
from files.json_files import JsonObject
from modelling.config_json import check_hf_settings
from modelling.llama.config_json import (
    hf_rope_parameters,
    load_hf_class,
    read_rope_settings,
    shortest_period,
    special_token_ids,
)

SHARED = (
    "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "query_pre_attn_scalar", "attn_logit_softcapping",
    "sliding_window", "hidden_activation", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip
"""Settings of a stack with the same names and values in our configuration."""

READ_IN_STACK = {
    *SHARED, "vocab_size", "layer_types", "rope_parameters", "rope_theta", "rope_scaling",
    "final_logit_softcapping", "is_decoder", "is_encoder_decoder", "tie_word_embeddings",
    "cross_attention_hidden_size",
}  # fmt: skip
"""Settings of a stack that are read, or follow from others."""

ROPE_TYPES = ("default", "linear")

STACK_TYPE = "t5_gemma_module"


# ---- from config.json ---------------------------------------------------------------------------
def from_config_json(hf_config: JsonObject) -> dict[str, Any]:
    """Returns the fields of the `model` section that a config.json sets; raises ConfigError."""
    data = hf_config.data
    read = {*STACKS, "tie_word_embeddings", "vocab_size"}
    check_hf_settings(data, "t5gemma", read, {"is_encoder_decoder": (True, True)})
    for name in STACKS:
        stack = hf_config.mapping(name) if name in hf_config else {}
        check_hf_settings(stack, STACK_TYPE, READ_IN_STACK, {"attention_bias": (False, False)})
    hf = load_hf_class("t5gemma", data)
    encoder, decoder = (getattr(hf, name) for name in STACKS)
    if encoder.vocab_size != decoder.vocab_size:
        raise ConfigError(
            f"the model's config.json has encoder.vocab_size {format_value(encoder.vocab_size)} "
            f"and decoder.vocab_size {format_value(decoder.vocab_size)}, but they must be equal"
        )
    tokens = special_token_ids(hf, decoder.vocab_size) | {"bos_token_id": decoder.bos_token_id}
    return {
        "vocab_size": decoder.vocab_size,
        "tie_word_embeddings": hf.tie_word_embeddings,
        "dropout_prob": hf.dropout_rate,
        "attention_dropout": hf.attention_dropout,
        "final_logit_softcapping": decoder.final_logit_softcapping,
        "initializer_range": hf.initializer_range,
        **tokens,
        "encoder": _stack_fields(encoder),
        "decoder": _stack_fields(decoder),
    }


def _stack_fields(hf: Any) -> dict[str, Any]:
    """Returns the fields of one stack (encoder or decoder) from its transformers configuration."""
    fields = {name: getattr(hf, name) for name in SHARED}
    if fields["sliding_window"] is None:
        fields["sliding_window"] = GemmaStack.sliding_window  # all attention is full
    fields["layer_types"] = ",".join(shortest_period(list(hf.layer_types)))
    settings = read_rope_settings(hf)
    rope = settings["rope_parameters"]
    if rope.keys() - {"rope_type", "rope_theta", "factor"} or rope["rope_type"] not in ROPE_TYPES:
        raise ConfigError(
            f"the model's config.json has rope_parameters {format_value(rope)}, but must have one "
            f"of the rope_types: {', '.join(ROPE_TYPES)}"
        )
    return fields | {
        "rope_theta": rope["rope_theta"],
        "rope_factor": rope.get("factor"),
        "rope_local_base_freq": settings["rope_local_base_freq"],
    }


# ---- to config.json -----------------------------------------------------------------------------
def to_config_json(config: T5GemmaConfig) -> dict[str, Any]:
    """Returns the content of config.json for a configuration."""
    model = config.model
    ends = model.eos_token_id, *model.extra_eos_token_ids
    shared = {
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_word_embeddings,
        "dropout_rate": model.dropout_prob,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.initializer_range,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": list(ends) if len(ends) > 1 else ends[0],
        "pad_token_id": model.pad_token_id,
    }
    hf_config: dict[str, Any] = {
        "model_type": "t5gemma",
        "architectures": ["T5GemmaForConditionalGeneration"],
        "is_encoder_decoder": True,
        **shared,
    }
    for name, stack in model.stacks.items():
        hf_config[name] = {
            "model_type": STACK_TYPE,
            **shared,
            **_hf_stack(stack),
            "attention_bias": False,
            "final_logit_softcapping": model.final_logit_softcapping,
            "is_decoder": name == "decoder",
        }
    hf_config["decoder"]["cross_attention_hidden_size"] = model.encoder.hidden_size
    return hf_config


def _hf_stack(stack: GemmaStack) -> dict[str, Any]:
    """Returns config.json's section of one stack, with RoPE settings in the old and new form."""
    rope = stack.rope_parameters
    return {
        **{name: getattr(stack, name) for name in SHARED},
        "layer_types": [SLIDING if layer.is_sliding else FULL for layer in stack.layers],
        "rope_theta": rope.rope_theta,
        "rope_parameters": hf_rope_parameters(rope, stack.rope_local_base_freq),
    }


def normalize_config_json(config: T5GemmaConfig, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json of any form as `to_config_json` would write it."""
    fields = from_config_json(JsonObject(dict(hf_config), "config.json"))
    model = T5GemmaModel.from_dict(config.model.to_dict() | fields)
    return to_config_json(replace(config, model=model))
