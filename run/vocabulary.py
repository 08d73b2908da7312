"""An embedding and a head that differ from those of the model that is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from config.model import Embedding, TiedEmbedding
from config.sections import RunConfig
from files.json_files import Fields
from modelling.spec import family_of
from modelling.weights import Arrays, Computed, WeightTable
from modelling.weights.vocabulary import embedding_names, vocabulary_names
from run.checks import ModelTensors
from run.over import Over

HEAD = "lm_head.weight"


def as_loaded(
    config: RunConfig, description: Mapping[str, Any] | None, tensors: ModelTensors, name: str
) -> RunConfig:
    """The configuration of the model that is loaded, where the configured one has another
    vocabulary: fewer rows, or a head that is the embedding.

    Args:
        description: the model's config.json.
        tensors: its weights.
        name: of the model, for messages.
    """
    family, embedding = family_of(config), config.model.embedding
    names = [n for n in embedding_names(family.table(config)) if n in tensors]
    rows = tensors.spec(names[0]).shape[0] if names else embedding.vocab_size
    if set(range(rows, embedding.vocab_size)) <= {*embedding.rows_to_begin()}:
        embedding = _with_rows(embedding, min(rows, embedding.vocab_size))
    may_untie = not family.head_in_files and HEAD not in tensors and description is not None
    if may_untie and isinstance(embedding, TiedEmbedding) and not embedding.tied:
        of_model = family.from_config_json(Fields(dict(description or {}), name))
        embedding = replace(embedding, tied=of_model["embedding"].get("tied", False))
    last, model = embedding.vocab_size - 1, config.model
    end, pad = min(model.end_token, last), min(model.pad_token, last)
    return replace(config, model=replace(model, embedding=embedding, end_token=end, pad_token=pad))


def _with_rows(embedding: Embedding, rows: int) -> Embedding:
    return replace(embedding, vocab_size=rows, new_rows=None)


def with_vocabulary(
    config: RunConfig, table: WeightTable, loaded: WeightTable, weights: Arrays
) -> Arrays:
    """Weights with the configured vocabulary. New rows are the mean of the others; a head that is
    tied in the loaded model begins as a copy of the embedding.

    Args:
        table: of the configured model.
        loaded: of the model that the weights are of.
    """
    (embedding, *_), own = embedding_names(loaded), {w.name for w in loaded.weights}
    rows, new = config.model.embedding.vocab_size, config.model.embedding.rows_to_begin()
    makers = {}
    for name in vocabulary_names(table):
        source = name if name in own else embedding
        if new:
            makers[name] = partial(_with_new_rows, weights, source, rows, new)
        elif source != name:
            makers[name] = partial(weights.__getitem__, source)
    return Over(Computed(makers), weights)


def _with_new_rows(weights: Arrays, name: str, rows: int, new: Sequence[int]) -> np.ndarray:
    """A weight with so many rows, of which those that are new are the mean of the others."""
    old = weights[name]
    others = np.ones(len(old), bool)
    others[[row for row in new if row < len(old)]] = False
    whole = np.empty((rows, *old.shape[1:]), old.dtype)
    whole[: len(old)] = old
    whole[list(new)] = old[others].mean(axis=0, dtype=np.float64).astype(old.dtype)
    return whole
