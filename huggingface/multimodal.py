"""Multimodal models around a language model: only the language model is trained; an export copies
the other weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from checkpoints.lazy_arrays import Arrays, ArraysView, LazyArrays
from files.json_files import JsonObject
from huggingface.model_folders import ModelFiles

TEXT_MODEL_TYPES = {"gemma3": "gemma3_text", "mistral3": "mistral"}
"""Multimodal model types, each with its text model's type where text_config has none."""
HEADLESS_PREFIXES = {"bart": "model."}
"""Model types published without a head too, with the prefix of the other weights' names."""
HEAD_WEIGHTS = {"lm_head.weight", "language_model.lm_head.weight"}

_SHARED_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "task_specific_params")
_TEXT = re.compile(
    r"(?:language_model\.)?(lm_head\..*)|(?:language_model\.model|model\.language_model)(\..*)"
)
"""Names of the text model's weights, before transformers 5 and since."""


def multimodal_type(hf_config: Mapping[str, Any]) -> str | None:
    """The `model_type` of a config.json if it is multimodal, else None."""
    kind = hf_config.get("model_type")
    return kind if isinstance(kind, str) and kind in TEXT_MODEL_TYPES else None


def headless_prefix(hf_config: Mapping[str, Any], names: Collection[str]) -> str:
    """Prefix that weight names lack in files without a head, as transformers' `base_model_prefix`;
    "" if they have it."""
    kind = hf_config.get("model_type")
    prefix = HEADLESS_PREFIXES.get(kind, "") if isinstance(kind, str) else ""
    return "" if any(name.startswith(prefix) for name in names) else prefix


def text_model_config(hf_config: JsonObject, names: Collection[str] | None) -> JsonObject:
    """The text model's config.json, from a multimodal model's; others are returned as is.

    Args:
        names: of the weights, which say whether the head is the embedding; None: they are not here.
    """
    data, kind = hf_config.data, multimodal_type(hf_config.data)
    if kind is None:
        return hf_config
    text = {"model_type": TEXT_MODEL_TYPES[kind]} | hf_config.mapping("text_config")
    of_the_text = (*_SHARED_FIELDS, "quantization_config")
    text |= {name: data[name] for name in of_the_text if data.get(name) is not None}
    tied = data.get("tie_word_embeddings", True)
    text["tie_word_embeddings"] = tied if names is None else HEAD_WEIGHTS.isdisjoint(names)
    return hf_config.with_data(text)


def text_tensor_name(name: str) -> str | None:
    """The text model's name of a weight; None if it is of another part."""
    match = _TEXT.fullmatch(name)
    return match and (match[1] or f"model{match[2]}")


def text_tensors(files: ModelFiles) -> ArraysView:
    """The text model's weights, by their names in the text model."""
    return ArraysView(
        files,
        renamed={text: name for name in files if (text := text_tensor_name(name)) is not None},
    )


def with_text_tensors(files: ModelFiles, text: Arrays) -> Arrays:
    """All weights of a multimodal model, with the text model's replaced."""
    makers = {}
    for name in files:
        own = text_tensor_name(name)
        if own is None:
            makers[name] = partial(files.__getitem__, name)
        elif own in text:
            makers[name] = partial(text.__getitem__, own)
    return LazyArrays(makers)


def multimodal_config(base: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """A multimodal model's config.json, updated with the trained tokens and task."""
    changed = {name: text[name] for name in _SHARED_FIELDS if text.get(name) is not None}
    return {**base, **changed}
