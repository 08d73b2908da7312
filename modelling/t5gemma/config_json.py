"""Conversion between config.json of T5Gemma 1 or 2, with a section per stack, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

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


class _Sections(NamedTuple):
    """The model types of config.json's sections, and the fields that they alone have.

    Attributes:
        encoder, decoder: model type of a stack's settings.
        cls: transformers' class of the whole.
        required: by name, settings of a stack that must have a value, and the default.
    """

    encoder: str
    decoder: str
    cls: str
    required: Mapping[str, tuple[Any, Any]]


SECTIONS = {
    "t5gemma": _Sections(
        "t5_gemma_module",
        "t5_gemma_module",
        "T5GemmaForConditionalGeneration",
        {"attention_bias": (False, False)},
    ),
    "t5gemma2": _Sections(
        "t5gemma2_text",
        "t5gemma2_decoder",
        "T5Gemma2ForConditionalGeneration",
        {"attention_bias": (False, False), "attn_logit_softcapping": (None, None)},
    ),
}
IMAGES = {
    "text_config", "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index",
    "image_token_index", "tie_word_embeddings",
}  # fmt: skip
"""Settings of T5Gemma 2's encoder around those of its text part."""


# ---- from config.json ---------------------------------------------------------------------------
def from_config_json(hf_config: JsonObject) -> dict[str, Any]:
    """Returns the fields of the `model` section that a config.json sets; raises ConfigError."""
    data, model_type = hf_config.data, hf_config.get_text("model_type")
    sections, is_merged = SECTIONS[model_type], model_type == "t5gemma2"
    read = {*STACKS, "tie_word_embeddings", "vocab_size", *(IMAGES if is_merged else ())}
    check_hf_settings(data, model_type, read, {"is_encoder_decoder": (True, True)})
    for name in STACKS:
        stack = hf_config.get_object(name) if name in hf_config else JsonObject({}, "config.json")
        if is_merged and name == "encoder":
            check_hf_settings(stack.data, "t5gemma2_encoder", IMAGES)
            stack = (
                stack.get_object("text_config") if "text_config" in stack else stack.with_data({})
            )
        stack_type = getattr(sections, name)
        check_hf_settings(stack.data, stack_type, READ_IN_STACK, sections.required)
    hf = load_hf_class(model_type, data)
    encoder, decoder = hf.encoder.text_config if is_merged else hf.encoder, hf.decoder
    if encoder.vocab_size != decoder.vocab_size:
        raise ConfigError(
            f"the model's config.json has encoder.vocab_size {format_value(encoder.vocab_size)} "
            f"and decoder.vocab_size {format_value(decoder.vocab_size)}, but they must be equal"
        )
    tokens = special_token_ids(hf, decoder.vocab_size) | {"bos_token_id": decoder.bos_token_id}
    return {
        "model_type": model_type,
        "vocab_size": decoder.vocab_size,
        "tie_word_embeddings": hf.tie_word_embeddings,
        "dropout_prob": hf.dropout_rate,
        "attention_dropout": hf.attention_dropout,
        "final_logit_softcapping": decoder.final_logit_softcapping,
        "initializer_range": hf.initializer_range,
        **tokens,
        **({"eoi_token_index": hf.eoi_token_index} if is_merged else {}),
        "encoder": _read_stack(encoder, is_merged),
        "decoder": _read_stack(decoder, is_merged),
    }


def _read_stack(hf: Any, has_local_rope: bool) -> dict[str, Any]:
    """Returns the fields of one stack (encoder or decoder) from its transformers configuration."""
    fields = {name: getattr(hf, name) for name in SHARED}
    if fields["sliding_window"] is None:
        fields["sliding_window"] = GemmaStack.sliding_window  # all attention is full
    fields["layer_types"] = ",".join(shortest_period(list(hf.layer_types)))
    settings = read_rope_settings(hf, has_local_rope)
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
    model, sections = config.model, SECTIONS[config.model.model_type]
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
    stacks: dict[str, dict[str, Any]] = {
        name: {
            "model_type": getattr(sections, name),
            **shared,
            **_hf_stack(stack),
            "attention_bias": False,
            "final_logit_softcapping": model.final_logit_softcapping,
        }
        for name, stack in model.stacks.items()
    }
    if model.is_merged:
        eoi = {"eoi_token_index": model.eoi_token_index}
        text = {"model_type": "t5gemma2_encoder", "text_config": stacks["encoder"], **eoi}
        stacks, shared = {**stacks, "encoder": text}, shared | eoi
    else:
        for name, stack in stacks.items():
            stack["is_decoder"] = name == "decoder"
        stacks["decoder"]["cross_attention_hidden_size"] = model.encoder.hidden_size
    return {
        "model_type": model.model_type,
        "architectures": [sections.cls],
        "is_encoder_decoder": True,
        **shared,
        **stacks,
    }


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
