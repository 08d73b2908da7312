"""The weights with a row for each token: the embedding and the head, which may be one."""

from __future__ import annotations

from collections.abc import Collection

from config.errors import ConfigError
from files.shown import shown_names, shown_path
from modelling.weights.adapters import module_of
from modelling.weights.row import WeightRow
from modelling.weights.table import WeightTable

EMBEDDINGS = "embeddings"
"""The layer of the embedding, in every family's table."""


_PATHS = ("tokens.weight", "lm_head.weight", "lm_head.bias")
"""Variables with a row for each token."""


def vocabulary_names(table: WeightTable) -> list[str]:
    """The weights of the embedding and the head."""
    return [w.name for row in table.rows if has_vocabulary(row) for w in row.weights]


def has_vocabulary(row: WeightRow) -> bool:
    """Decide whether a row has a weight's row for each token."""
    return row.path in _PATHS


def embedding_names(table: WeightTable) -> list[str]:
    """The embedding's names in files: its own, then those of weights that are tied to it."""
    (row,) = (row for row in table.layers[EMBEDDINGS] if row.path == _PATHS[0])
    own = row.weights[0].name
    return [own, *(alias for alias, name in table.aliases.items() if name == own)]


def unties_head(table: WeightTable, adapted: Collection[str], is_tied: bool, folder: str) -> bool:
    """Decide whether an adapter's model has a head apart from the embedding that its base has.

    Args:
        table: of the base model, without adapters.
        adapted: modules that the adapter has tensors of.
        is_tied: the adapter's `ensure_weight_tying`.
        folder: of the adapter, for messages.

    Raises:
        ConfigError: it parts weights that are one in this model.
    """
    tied = [module_of(name) for name in embedding_names(table)]
    there = [module for module in tied if module in adapted]
    if not there or len(tied) == 1:
        return False
    if len(tied) == 2:  # an embedding and a head
        return not is_tied
    missing = [module for module in tied[1:] if module not in adapted]  # the first one is not used
    if missing:
        raise ConfigError(
            f"the adapter in {shown_path(folder)} trains {shown_names(there)} apart from "
            f"{shown_names(missing)}, which are one weight in this model: train it with "
            f"modules_to_save {','.join(tied)}"
        )
    return False


def has_tied_head(table: WeightTable, names: Collection[str]) -> bool:
    """Decide whether some weights are of an embedding that is a decoder's head too, or of its
    adapter: PEFT's `ensure_weight_tying`, which it knows for such pairs alone."""
    own, *tied = map(module_of, embedding_names(table))
    return len(tied) == 1 and own in map(module_of, names)
