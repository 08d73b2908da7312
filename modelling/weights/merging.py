"""The weights of a model with its adapters merged: W + scale * B A."""

from __future__ import annotations

from functools import partial

import numpy as np

from modelling.weights.adapters import A, B, module_of
from modelling.weights.computed import Arrays, Computed
from modelling.weights.row import LowRank
from modelling.weights.table import WeightTable


def merged(table: WeightTable, weights: Arrays) -> Arrays:
    """The weights of the base model, each merged when it is asked for, in its own type.

    Args:
        weights: of the model with adapters.
    """
    rows = [row for rows in table.layers.values() for row in rows if not row.of_adapter]
    makers = {w.name: partial(weights.__getitem__, w.name) for row in rows for w in row.weights}
    for adapter in (adapter for row in rows for adapter in row.adapters):
        makers |= {name: partial(_merged, weights, name, adapter) for name in adapter.weights}
    return Computed(makers)


def _merged(weights: Arrays, name: str, adapter: LowRank) -> np.ndarray:
    weight = weights[name]
    b, a = weights[f"{module_of(name)}.{B}"], weights[f"{adapter.module}.{A}"]
    total = weight.astype(np.float32) + np.float32(adapter.scale) * (b @ a)
    return total.astype(weight.dtype, copy=False)
