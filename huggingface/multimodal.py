"""Models of texts and images, of which the text part is a language model of its own: that is read
and trained, and an export takes over all else as it is."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from checkpoints.lazy_arrays import Arrays, ArraysView, LazyArrays
from files.json_files import JsonObject
from huggingface.model_folders import ModelFiles

TEXT_MODEL_TYPES = {"gemma3": "gemma3_text", "mistral3": "mistral"}
"""Kinds of such models, and the kind of the text part where it is not said."""
HEADLESS_PREFIXES = {"bart": "model."}
"""Kinds that are published without a head too, and what begins the names of others' weights."""
HEAD_WEIGHTS = {"lm_head.weight", "language_model.lm_head.weight"}

_SHARED_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "task_specific_params")
_TEXT = re.compile(
    r"(?:language_model\.)?(lm_head\..*)|(?:language_model\.model|model\.language_model)(\..*)"
)
"""Weights of the text part, by their names before transformers 5 and since."""


def multimodal_type(hf_config: Mapping[str, Any]) -> str | None:
    """The kind of the model that a config.json describes, if it is such a model."""
    kind = hf_config.get("model_type")
    return kind if isinstance(kind, str) and kind in TEXT_MODEL_TYPES else None


def headless_prefix(hf_config: Mapping[str, Any], names: Collection[str]) -> str:
    """Prefix that names of weights lack where the files are of a model without its head, as in
    transformers' `base_model_prefix`; "" where they lack nothing."""
    kind = hf_config.get("model_type")
    prefix = HEADLESS_PREFIXES.get(kind, "") if isinstance(kind, str) else ""
    return "" if any(name.startswith(prefix) for name in names) else prefix


def text_model_config(hf_config: JsonObject, names: Collection[str] | None) -> JsonObject:
    """The config.json of the language model in one, if it is such a model; else itself.

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
    """What the language model calls a weight; None: it has none of that name."""
    match = _TEXT.fullmatch(name)
    return match and (match[1] or f"model{match[2]}")


def text_tensors(files: ModelFiles) -> ArraysView:
    """The weights of the text part."""
    return ArraysView(
        files,
        renamed={text: name for name in files if (text := text_tensor_name(name)) is not None},
    )


def with_text_tensors(files: ModelFiles, text: Arrays) -> Arrays:
    """All weights of such a model: those of the text part anew, the others as the files have
    them."""
    makers = {}
    for name in files:
        own = text_tensor_name(name)
        if own is None:
            makers[name] = partial(files.__getitem__, name)
        elif own in text:
            makers[name] = partial(text.__getitem__, own)
    return LazyArrays(makers)


def multimodal_config(base: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of such a model, with what training changes of the text part's: its tokens
    and its task."""
    changed = {name: text[name] for name in _SHARED_FIELDS if text.get(name) is not None}
    return {**base, **changed}
