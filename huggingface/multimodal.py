"""Multimodal models of which only the language model is trained.

An export copies the other weights from the base model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from checkpoints.lazy_arrays import Arrays, ArraysView, LazyArrays
from files.json_files import JsonObject
from huggingface.model_folders import ModelFiles

TEXT_MODEL_TYPES = {"gemma3": "gemma3_text", "mistral3": "mistral", "t5gemma2": "t5gemma2"}
"""Multimodal model types, each with its text model's type where text_config has none. T5Gemma 2's
text part has no config.json of its own."""
HEADLESS_PREFIXES = dict.fromkeys(("bart", "mbart", "m2m_100", "marian", "pegasus"), "model.")
"""Model types published without a head too, with the prefix of the other weights' names."""
HEAD_WEIGHTS = {"lm_head.weight", "language_model.lm_head.weight"}

IMAGE_MODULES = {"t5gemma2": r"model\.encoder\.(vision_tower|multi_modal_projector)\..*"}
"""Expression of the modules for images, by model type, if the text part has modules of the same
names, with which PEFT would adapt them too."""

_SHARED_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "task_specific_params")
_TEXT = re.compile(
    r"(?:language_model\.)?(lm_head\..*)|(?:language_model\.model|model\.language_model)(\..*)"
)
"""Names of the text model's weights, before transformers 5 and since."""
_T5GEMMA2_TEXT = re.compile(
    r"(model\.decoder\..*)|model\.encoder\.(?:text_model\.)?((?:embed_tokens|layers|norm)\..*)"
)
"""Names of the weights of T5Gemma 2's text part; files leave out "text_model"."""


def multimodal_type(hf_config: Mapping[str, Any]) -> str | None:
    """The `model_type` of a config.json if it is a multimodal model's, else None."""
    model_type = hf_config.get("model_type")
    return model_type if isinstance(model_type, str) and model_type in TEXT_MODEL_TYPES else None


def prefix_without_lm_head(hf_config: Mapping[str, Any], names: Collection[str]) -> str:
    """Prefix of weight names that files without an LM head leave out; "" if names have it.

    It is transformers' `base_model_prefix`.
    """
    model_type = hf_config.get("model_type")
    prefix = HEADLESS_PREFIXES.get(model_type, "") if isinstance(model_type, str) else ""
    return "" if any(name.startswith(prefix) for name in names) else prefix


def text_model_config(hf_config: JsonObject, names: Collection[str] | None) -> JsonObject:
    """The language model's config.json, from a multimodal model's.

    Other configurations are returned as they are.

    Args:
        names: of the weights, which say whether the head is the embedding; None: they are not here.
    """
    data, model_type = hf_config.data, multimodal_type(hf_config.data)
    if model_type is None or TEXT_MODEL_TYPES[model_type] == model_type:
        return hf_config
    text_config = {"model_type": TEXT_MODEL_TYPES[model_type]} | hf_config.get_dict("text_config")
    shared_fields = (*_SHARED_FIELDS, "quantization_config")
    text_config |= {name: data[name] for name in shared_fields if data.get(name) is not None}
    tied = data.get("tie_word_embeddings", True)
    text_config["tie_word_embeddings"] = tied if names is None else HEAD_WEIGHTS.isdisjoint(names)
    return hf_config.with_data(text_config)


def text_tensor_name(name: str) -> str | None:
    """Name of a weight in the language model; None for weights of other modules."""
    if match := _T5GEMMA2_TEXT.fullmatch(name):
        return match[1] or f"model.encoder.text_model.{match[2]}"
    match = _TEXT.fullmatch(name)
    return match and (match[1] or f"model{match[2]}")


def text_tensors(files: ModelFiles) -> ArraysView:
    """Weights of the language model in a multimodal model, by their names in the language model."""
    return ArraysView(
        files,
        renamed={text: name for name in files if (text := text_tensor_name(name)) is not None},
    )


def with_text_tensors(files: ModelFiles, text_weights: Arrays) -> Arrays:
    """Weights of a multimodal model, with those of the language model replaced."""
    makers = {}
    for name in files:
        text_name = text_tensor_name(name)
        if text_name is None:
            makers[name] = partial(files.__getitem__, name)
        elif text_name in text_weights:
            makers[name] = partial(text_weights.__getitem__, text_name)
    return LazyArrays(makers)


def multimodal_config(
    base_config: Mapping[str, Any], text_config: Mapping[str, Any]
) -> dict[str, Any]:
    """A multimodal model's config.json with updated token ids and task settings."""
    changed = {
        name: text_config[name] for name in _SHARED_FIELDS if text_config.get(name) is not None
    }
    return {**base_config, **changed}
