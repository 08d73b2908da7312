"""Deterministic scatter-add of rows: the gradient of a gather.

On a GPU, atomic additions come in any order, so XLA sorts rows before it adds those with equal
indices, all their elements with them. Here the indices alone are sorted, or compared, where there
are few. Sums of equal ones within blocks of rows are a product with a matrix of zeros and ones;
what is left has indices that differ, and few rows that go on from a block to the next.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl.ops._reductions import traced_platform

_BLOCK = 128  # rows
_FEW = 1024  # rows that are compared each with each


def scatter_add(target: Any, row_indices: Any, rows: Any) -> Any:
    """Returns `target` with target[row_indices[i]] += rows[i], bitwise reproducible.

    On a GPU, a row that is not finite makes NaNs of others that are added, too.

    Args:
        target: (size, ...), of floating-point numbers in at least float32, or integers.
        row_indices: (...) of integers in [0, size]; rows with index `size` are dropped.
        rows: (*row_indices.shape, ...), in the type of `target`, or in a half type.
    """
    if traced_platform() != "gpu" or not jnp.issubdtype(rows.dtype, jnp.floating):
        return target.at[row_indices].add(rows.astype(target.dtype), mode="drop")
    size, features = target.shape[0], math.prod(target.shape[1:])
    if not features or not row_indices.size:
        return target
    table, row_indices = target.reshape(size, features), row_indices.reshape(-1).astype(jnp.int32)
    rows = jnp.where((row_indices < size)[:, None], rows.reshape(-1, features), 0)
    if len(row_indices) <= _FEW:
        sums = _scatter_add_few(table, row_indices, rows)
    else:
        order = jnp.argsort(row_indices)
        sums = _scatter_add_sorted(table, row_indices[order], rows[order])
    return sums.reshape(target.shape)


def scatter_add_presummed(target: Any, row_indices: Any, rows: Any) -> Any:
    """Scatter-add for GPUs: sums of rows with equal indices are rounded to the rows' dtype.

    The bits are those of adding a dense array of such sums; it takes memory for the rows alone.
    """
    size, features, count = target.shape[0], math.prod(target.shape[1:]), row_indices.size
    row_indices = row_indices.reshape(-1).astype(jnp.int32)
    rows = jnp.where((row_indices < size)[:, None], rows.reshape(count, features), 0)
    if count <= _FEW:
        index, sums = _sum_equal_indices(size, row_indices, rows)
    else:
        order = jnp.argsort(row_indices)
        row_indices = row_indices[order]
        number = jnp.cumsum(
            jnp.pad(row_indices[1:] != row_indices[:-1], (1, 0))
        )  # of the sum of each row
        zeros = jnp.zeros((count, features), jnp.promote_types(rows.dtype, jnp.float32))
        sums = _scatter_add_sorted(zeros, number, rows[order])
        index = jnp.full(count, size).at[number].set(row_indices)
    table = target.reshape(size, features)
    return _scatter_unique(table, index, sums.astype(rows.dtype)).reshape(target.shape)


def _scatter_add_few(target: Any, row_indices: Any, rows: Any) -> Any:
    """Scatter-add of few rows, by comparing all pairs of indices."""
    return _scatter_unique(target, *_sum_equal_indices(len(target), row_indices, rows))


def _sum_equal_indices(size: int, row_indices: Any, rows: Any) -> tuple[Any, Any]:
    """Sums rows with equal indices: the sum at the first of them, index `size` at the rest.

    Returns (indices, sums).
    """
    equal = row_indices[:, None] == row_indices
    is_first = ~jnp.any(jnp.tril(equal, -1), 1)
    index = jnp.where(is_first, row_indices, size)
    return index, _sum_runs(equal, rows, (((1,), (0,)), ((), ())))


def _scatter_add_sorted(target: Any, row_indices: Any, rows: Any) -> Any:
    """Scatter-add of rows whose equal indices are adjacent (sorted)."""
    (size, features), blocks = target.shape, math.ceil(len(row_indices) / _BLOCK)
    missing = blocks * _BLOCK - len(row_indices)
    row_indices = jnp.pad(row_indices, (0, missing), constant_values=size).reshape(blocks, _BLOCK)
    rows = jnp.pad(rows, ((0, missing), (0, 0))).reshape(blocks, _BLOCK, features)
    differs = jnp.pad(row_indices[:, 1:] != row_indices[:, :-1], ((0, 0), (1, 0)))
    is_of = jnp.cumsum(differs, 1)[:, None, :] == jnp.arange(_BLOCK)[None, :, None]  # sum, row
    sums = _sum_runs(is_of, rows, (((2,), (1,)), ((0,), (0,))))
    index = jnp.min(jnp.where(is_of, row_indices[:, None, :], size), -1)
    goes_on = jnp.pad(
        row_indices[1:, 0] == row_indices[:-1, -1], (1, 0)
    )  # a block with the row before it
    first = jnp.where(goes_on, index[:, 0], size)
    index = index.at[:, 0].set(jnp.where(goes_on, size, index[:, 0])).reshape(-1)
    out = _scatter_unique(target, index, sums.reshape(-1, features))
    rest = _scatter_add_few if blocks <= _FEW else _scatter_add_sorted
    return rest(out, first, sums[:, 0])


def _sum_runs(is_in_run: Any, rows: Any, dims: Any) -> Any:
    """Sums the rows of each run of equal adjacent indices, accumulated in float32."""
    return lax.dot_general(
        is_in_run.astype(rows.dtype), rows, dims, precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.promote_types(rows.dtype, jnp.float32),
    )  # fmt: skip


def _scatter_unique(target: Any, index: Any, sums: Any) -> Any:
    """Scatter-add at unique indices; index len(target) marks rows to drop."""
    size = len(target)
    apart = jnp.where(index < size, index, size + jnp.arange(index.size))
    return target.at[apart].add(sums.astype(target.dtype), mode="drop", unique_indices=True)
