"""The weights of a model with its adapters merged, and what adapters begin with."""

from __future__ import annotations

from functools import partial

import numpy as np

from config.model import FewBits
from modelling.quantisation import expanded
from modelling.weights.adapters import TOKENS_A, TOKENS_B, A, B, M, module_of
from modelling.weights.computed import Arrays, Computed
from modelling.weights.row import LowRank, fits_few_bits, is_of_adapter
from modelling.weights.table import TokenRowsOf, WeightTable


def merged(
    table: WeightTable, weights: Arrays, dtype: np.dtype, few_bits: FewBits | None = None
) -> Arrays:
    """The weights of the base model, each merged when it is asked for.

    Args:
        weights: of the model with adapters.
        dtype: of the result.
        few_bits: merge into what is left of weights that are held so; None: into the weights.
    """
    adapters = dict(_adapted(table))
    names = [w.name for w in table.base.weights]
    if few_bits is not None:
        packed = {w.name for w in table.only(fits_few_bits).weights}
        left = {name: partial(_left, weights, name, few_bits) for name in packed}
        others = {n: partial(weights.__getitem__, n) for n in weights if n not in packed}
        weights = Computed(left | others)
    makers = {n: partial(_merged, weights, n, adapters.get(n), dtype) for n in names}
    makers |= {n: partial(_with_rows, weights, n, r, dtype) for n, r in table.token_rows.items()}
    return Computed(makers)


def begun(table: WeightTable, base: Arrays, seed: int) -> Arrays:
    """The weights of new adapters, which change nothing: DoRA's norms are those of the base."""
    own = table.only(is_of_adapter).initial(seed)
    makers = {name: partial(own.__getitem__, name) for name in own}
    for name, adapter in _adapted(table):
        if adapter.dora:
            makers[f"{module_of(name)}.{M}"] = partial(_norms_of, base, name)
    for name, rows in table.token_rows.items():
        makers[rows.delta] = partial(_rows_of, base, name, rows)
    return Computed(makers)


def _adapted(table: WeightTable) -> list[tuple[str, LowRank]]:
    """Each weight that has an adapter, and this."""
    return [(name, a) for row in table.rows for a in row.adapters for name in a.weights]


def _merged(weights: Arrays, name: str, adapter: LowRank | None, dtype: np.dtype) -> np.ndarray:
    weight, module = weights[name], module_of(name)
    if adapter is None:
        return weight.astype(dtype, copy=False)
    if adapter.embeds:
        a, b = (weights[f"{module}.{end}"] for end in (TOKENS_A, TOKENS_B))
        b, a = a.T, b.T
    else:
        b, a = weights[f"{module}.{B}"], weights[f"{adapter.module}.{A}"]
    total = weight.astype(np.float32) + np.float32(adapter.scale) * (b @ a)
    if adapter.dora:
        total *= (weights[f"{module}.{M}"] / _norms(total))[:, None]
    return total.astype(dtype, copy=False)


def _with_rows(weights: Arrays, name: str, rows: TokenRowsOf, dtype: np.dtype) -> np.ndarray:
    """A weight in which rows are those that were trained."""
    whole = weights[name].astype(dtype)
    whole[list(rows.tokens)] = weights[rows.delta].astype(dtype)
    return whole


def _rows_of(base: Arrays, name: str, rows: TokenRowsOf) -> np.ndarray:
    found: np.ndarray = base[name][list(rows.tokens)].astype(np.float32)
    return found


def _left(weights: Arrays, name: str, few_bits: FewBits) -> np.ndarray:
    return expanded(weights[name], few_bits)


def _norms_of(weights: Arrays, name: str) -> np.ndarray:
    return _norms(weights[name].astype(np.float32))


def _norms(matrix: np.ndarray) -> np.ndarray:
    norms: np.ndarray = np.linalg.norm(matrix, axis=1)
    return norms
