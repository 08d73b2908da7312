"""Scatter-reductions by index tensors (sum, max, ... into given indices), and histograms."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp

from popxl._ir.op_registry import NoGrad, define
from popxl.ops._args import normalize_axis
from popxl.ops._emit import emit
from popxl.ops._index_bounds import check_constant_indices, indices_or_size
from popxl.ops._numerics import check_floating, check_number, check_same_dtype, upcast_half_types
from popxl.ops.gathering import check_groups, check_indices, element_indices
from popxl.tensor import Tensor

ScatterReductionType = Literal["sum", "min", "max", "none"]
reduction_dict = {name: name for name in ("sum", "min", "max", "none")}
_METHODS = {"sum": "add", "min": "min", "max": "max", "none": "set"}


# ---- scatter_reduce -----------------------------------------------------------------------------
def _identity_element(reduction: str, dtype: Any) -> Any:
    """Returns a scatter-reduction's identity element: 0, or the dtype's lowest or highest value."""
    if reduction in ("sum", "none"):
        return 0
    info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    return info.max if reduction == "min" else info.min


def _reduce_at_indices(start: Any, data: Any, indices: Any, axis: int, method: str) -> Any:
    """Reduces `data` into `start` at `indices`; in whole slices if `indices` has one axis."""
    size = start.shape[axis]
    where = indices_or_size(indices, size)
    if where.ndim == 1:
        target, rows = jnp.moveaxis(start, axis, 0), jnp.moveaxis(data, axis, 0)
        return jnp.moveaxis(getattr(target.at[where], method)(rows, mode="drop"), 0, axis)
    full = jnp.broadcast_to(where, data.shape)
    return getattr(start.at[element_indices(full, axis)], method)(data, mode="drop")


def _scatter_reduce(
    data: Any,
    indices: Any,
    *initial: Any,
    reduction: str,
    axis: int,
    axis_size: int,
    hints: Any = None,
) -> Any:
    check_same_dtype(data, *initial)
    if reduction != "none":
        check_number(data)
    wide = upcast_half_types(data)
    if initial:
        result = _reduce_at_indices(
            upcast_half_types(initial[0]), wide, indices, axis, _METHODS[reduction]
        )
        return result.astype(data.dtype)
    shape = (*data.shape[:axis], axis_size, *data.shape[axis + 1 :])
    start = jnp.full(shape, _identity_element(reduction, wide.dtype), wide.dtype)
    result = _reduce_at_indices(start, wide, indices, axis, _METHODS[reduction])
    if reduction in ("min", "max"):
        hit = _reduce_at_indices(
            jnp.zeros(shape, bool), jnp.ones(data.shape, bool), indices, axis, "set"
        )
        result = jnp.where(hit, result, 0)
    return result.astype(data.dtype)


def _grouped_scatter_reduce(*arrays: Any, **attrs: Any) -> Any:
    return jax.vmap(lambda *group: _scatter_reduce(*group, **attrs))(*arrays)


_SCATTER_REDUCE = define("scatter_reduce", _scatter_reduce)
_GROUPED_SCATTER_REDUCE = define("grouped_scatter_reduce", _grouped_scatter_reduce)


def grouped_scatter_reduce(
    data: Tensor,
    indices: Tensor,
    reduction: ScatterReductionType,
    initial_values: Tensor | None = None,
    axis: int = 0,
    axis_size: int | None = None,
    group_size: int = 1,
    enable_index_broadcast: bool = True,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """Reduces like `scatter_reduce`, separately for each group.

    Args:
        data, indices, initial_values: with more than one group, their first axis is the group.
        axis: axis of a group's part of `data` (so the group axis does not count).
        group_size: number of groups.

    Raises:
        ValueError, IndexError: as for `scatter_reduce`.
    """
    op = "scatter_reduce"
    grouped = group_size != 1
    check_indices(op, indices)
    if reduction not in _METHODS:
        raise ValueError(f"{op}: reduction {reduction!r} must be one of {', '.join(_METHODS)}")
    tensors = [data, indices] + ([] if initial_values is None else [initial_values])
    if grouped:
        check_groups(op, group_size, *tensors)
    axis = normalize_axis(op, data, axis, extra_axes=-grouped)
    if initial_values is not None and initial_values.rank != data.rank:
        raise ValueError(
            f"{op}: initial_values {initial_values.shape} must have the rank of data {data.shape}"
        )
    size = (data if initial_values is None else initial_values).shape[axis + grouped]
    if axis_size not in (None, size) and initial_values is not None:
        raise ValueError(f"{op}: axis_size={axis_size}, but the initial values have {size}")
    size = int(axis_size or size)
    check_constant_indices(op, indices, size)
    given = {"enable_index_broadcast": enable_index_broadcast,
             "available_memory_proportion": available_memory_proportion}  # fmt: skip
    attrs = {
        "reduction": reduction,
        "axis": axis,
        "axis_size": size,
        "hints": tuple((k, v) for k, v in given.items() if v is not None),
    }
    return emit(_GROUPED_SCATTER_REDUCE if grouped else _SCATTER_REDUCE, tensors, attrs)[0]


def scatter_reduce(
    data: Tensor,
    indices: Tensor,
    reduction: ScatterReductionType,
    initial_values: Tensor | None = None,
    axis: int = 0,
    axis_size: int | None = None,
    enable_index_broadcast: bool = True,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """Reduces the elements of `data` that share an index along `axis`.

    Args:
        data: what is reduced; half types are summed in float32.
        indices: integers: one for each slice of `data` along `axis`, or a tensor that broadcasts
            to `data`. Those out of range leave their elements out.
        reduction: "sum", "min", "max", or "none": a new value overwrites, and which of several
            stays is not defined.
        initial_values: what to reduce into, of the dtype of `data`; without it, positions that no
            index names are 0.
        axis_size: size of the result along `axis`; default: that of the initial values, or of
            `data`.
        enable_index_broadcast, available_memory_proportion: hints for other hardware; recorded.

    Raises:
        ValueError: an unknown reduction, no such axis, or indices that are not integers.
        IndexError: a constant has an index out of range.
    """
    return grouped_scatter_reduce(data, indices, reduction, initial_values, axis, axis_size, 1,
                                  enable_index_broadcast, available_memory_proportion)  # fmt: skip


# ---- histogram ----------------------------------------------------------------------------------
def _histogram(x: Any, levels: tuple[float, ...], absolute_of_input: bool) -> Any:
    check_floating(x)
    values = jnp.abs(x) if absolute_of_input else x
    bounds = jnp.asarray(levels, jnp.float32)
    bins = jnp.searchsorted(bounds, upcast_half_types(values).reshape(-1), side="right")
    return jnp.zeros(len(levels) + 1, jnp.uint32).at[bins].add(jnp.uint32(1))


_HISTOGRAM = define("histogram", _histogram, grad=NoGrad("integer output"))


def check_increment(levels: list[float]) -> None:
    """Raises ValueError unless the levels (bin edges) of a histogram increase."""
    if any(not a < b for a, b in pairwise(levels)) or any(map(math.isnan, levels)):
        raise ValueError(f"histogram: levels {levels} must increase")


def histogram(t: Tensor, levels: list[float], absolute_of_input: bool) -> Tensor:
    """Counts the elements in each bin between levels, as uint32.

    Args:
        levels: n increasing bounds. Element i of the n + 1 results counts those in
            [levels[i - 1], levels[i]), with everything below and above at the ends.
        absolute_of_input: count absolute values.

    Raises:
        ValueError: the levels do not increase.
    """
    check_increment(levels)
    attrs = {
        "levels": tuple(float(v) for v in levels),
        "absolute_of_input": bool(absolute_of_input),
    }
    return emit(_HISTOGRAM, [t], attrs)[0]
