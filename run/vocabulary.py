"""An embedding and a head that differ from those of the model that is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from checkpoints.arrays import Arrays, LazyArrays, Overlay
from config.base import flattened
from config.sections import RunConfig
from files.json_files import Fields
from modelling.spec import family_of
from modelling.weights import WeightTable

HEAD = "lm_head.weight"


def as_loaded(
    config: RunConfig, description: Mapping[str, Any] | None, tensors: LazyArrays, name: str
) -> RunConfig:
    """The configuration of the model that is loaded, where the configured one has another
    vocabulary: fewer rows, or a head that is the embedding.

    Args:
        description: the model's config.json.
        tensors: its weights.
        name: of the model, for messages.
    """
    family, model = family_of(config), config.model
    names = [n for n in family.table(config).embedding_names if n in tensors]
    rows = tensors.spec(names[0]).shape[0] if names else model.vocab_size
    values: dict[str, Any] = {}
    if set(range(rows, model.vocab_size)) <= {*model.rows_to_begin()}:
        rows = min(rows, model.vocab_size)
        values = {model.path("vocab_size"): rows, model.path("new_rows"): None}
        for token in ("eos_token_id", "pad_token_id"):
            values[f"model.{token}"] = min(getattr(model, token), rows - 1)
    may_untie = not family.head_in_files and HEAD not in tensors and description is not None
    if may_untie and model.tie_word_embeddings is False:
        of_model = family.from_config_json(Fields(dict(description or {}), name))
        tied = model.path("tie_word_embeddings")
        values[tied] = flattened({"model": of_model}).get(tied, False)
    return config.changed(values)


def with_vocabulary(
    config: RunConfig, table: WeightTable, loaded: WeightTable, weights: Arrays
) -> Arrays:
    """Weights with the configured vocabulary. New rows are the mean of the others; a head that is
    tied in the loaded model begins as a copy of the embedding.

    Args:
        table: of the configured model.
        loaded: of the model that the weights are of.
    """
    (embedding, *_), own = loaded.embedding_names, {w.name for w in loaded.weights}
    rows, new = config.model.vocab_size, config.model.rows_to_begin()
    makers = {}
    for name in table.vocabulary_names:
        source = name if name in own else embedding
        if new:
            makers[name] = partial(_with_new_rows, weights, source, rows, new)
        elif source != name:
            makers[name] = partial(weights.__getitem__, source)
    return Overlay(LazyArrays(makers), weights)


def _with_new_rows(weights: Arrays, name: str, rows: int, new: Sequence[int]) -> np.ndarray:
    """A weight with so many rows, of which those that are new are the mean of the others."""
    old = weights[name]
    others = np.ones(len(old), bool)
    others[[row for row in new if row < len(old)]] = False
    whole = np.empty((rows, *old.shape[1:]), old.dtype)
    whole[: len(old)] = old
    whole[list(new)] = old[others].mean(axis=0, dtype=np.float64).astype(old.dtype)
    return whole
