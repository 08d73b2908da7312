"""An embedding and a head that differ from those of the model that is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from config.sections import RunConfig
from files.json_files import Fields
from modelling.spec import family_of
from modelling.weights import Arrays, Computed, WeightTable
from modelling.weights.tying import embedding_names
from run.over import Over

HEAD = "lm_head.weight"


def as_loaded(
    config: RunConfig, description: Mapping[str, Any] | None, tensors: Arrays, name: str
) -> RunConfig:
    """The configuration of the model that is loaded, where the configured one has another
    vocabulary.

    Args:
        description: the model's config.json.
        tensors: its weights, by their names in files.
        name: of the model, for messages.
    """
    family, embedding = family_of(config), config.model.embedding
    may_untie = not family.head_in_files and HEAD not in tensors and description is not None
    if may_untie and getattr(embedding, "tied", None) is False:
        of_model = family.from_config_json(Fields(dict(description or {}), name))
        fields = {"tied": of_model["embedding"].get("tied", False)}
        embedding = replace(embedding, **fields)
    return replace(config, model=replace(config.model, embedding=embedding))


def with_vocabulary(table: WeightTable, loaded: WeightTable, weights: Arrays) -> Arrays:
    """Weights with the configured vocabulary: a head that is tied in the loaded model begins as a
    copy of the embedding.

    Args:
        table: of the configured model.
        loaded: of the model that the weights are of.
    """
    (embedding, *_), own = embedding_names(loaded), {w.name for w in loaded.weights}
    new = [w.name for w in table.weights if w.name not in own]
    return Over(Computed({name: partial(weights.__getitem__, embedding) for name in new}), weights)
