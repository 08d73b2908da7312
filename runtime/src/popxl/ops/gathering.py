"""Gather, scatter, one-hot and top-k: ops that select or place elements by index tensors."""

# ruff: noqa: N803 - names of PopXL's arguments
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from popxl._ir.op_registry import define
from popxl.ops._args import as_hint_attribute, check_tensors, normalize_axis
from popxl.ops._emit import emit
from popxl.ops._index_bounds import (
    check_constant_indices,
    clamp_indices,
    indices_or_size,
    is_in_range,
)
from popxl.ops._numerics import check_arithmetic, upcast_half_types
from popxl.ops._reductions import traced_platform
from popxl.ops._scatter_add import scatter_add, scatter_add_presummed
from popxl.tensor import Constant, Tensor


# ---- gather -------------------------------------------------------------------------------------
def _gather(
    t: Any,
    indices: Any,
    axis: int,
    zero_oor: bool,
    available_memory_proportion: float | None = None,
) -> Any:
    if not t.shape[axis] and indices.size:
        raise ValueError(f"axis {axis} of shape {t.shape} has no elements to take")
    taken = jnp.take(t, clamp_indices(indices, t.shape[axis]), axis, mode="clip")
    if not zero_oor:
        return taken
    shape = (1,) * axis + indices.shape + (1,) * (t.ndim - axis - 1)
    valid = is_in_range(indices, t.shape[axis]).reshape(shape)
    return jnp.where(valid, taken, jnp.zeros((), t.dtype))


def _grad_rows_and_indices(
    dy: Any, indices: Any, size: int, axis: int, zero_oor: bool
) -> tuple[Any, Any]:
    """Returns the rows of a gradient, and each row's index in the gathered table."""
    count = indices.ndim
    rows = jnp.moveaxis(dy, range(axis, axis + count), range(count))
    return rows, (indices_or_size if zero_oor else clamp_indices)(indices, size)


def _scatter_add_rows(
    dy: Any, indices: Any, shape: tuple[int, ...], axis: int, zero_oor: bool
) -> Any:
    """Scatter-adds into zeros, with float32 sums since a row can get many contributions."""
    rows, where = _grad_rows_and_indices(dy, indices, shape[axis], axis, zero_oor)
    zeros = upcast_half_types(jnp.zeros((shape[axis], *shape[:axis], *shape[axis + 1 :]), dy.dtype))
    return jnp.moveaxis(scatter_add(zeros, where, rows), 0, axis).astype(dy.dtype)


def _scatter_add_rows_onto(
    t: Any, dy: Any, indices: Any, shape: tuple[int, ...], axis: int, zero_oor: bool
) -> Any:
    """Scatter-adds onto `t`; on a GPU, large tables are only touched in the rows that change."""
    is_whole = axis > 0 or indices.size >= shape[0] or upcast_half_types(t).dtype != t.dtype
    if is_whole or traced_platform() != "gpu" or not jnp.issubdtype(dy.dtype, jnp.floating):
        return (
            upcast_half_types(t) + _scatter_add_rows(dy, indices, shape, axis, zero_oor)
        ).astype(t.dtype)
    rows, where = _grad_rows_and_indices(dy, indices, shape[0], axis, zero_oor)
    return scatter_add_presummed(t, where, rows)


_GATHER_GRAD = define("gather_grad", _scatter_add_rows, add_to=_scatter_add_rows_onto)


def _gather_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor | None]:
    table, indices = op.inputs
    attrs = {
        "shape": table.shape,
        "axis": op.attrs["axis"],
        "zero_oor": op.attrs["zero_oor"],
    }
    return [emit(_GATHER_GRAD, [dy, ctx.fwd(indices)], attrs)[0], None]


_GATHER = define("gather", _gather, grad=_gather_grad)


def gather(
    t: Tensor,
    indices: Tensor,
    axis: int = 0,
    available_memory_proportion: float | None = None,
    zero_OOR: bool = False,
) -> Tensor:
    """Returns the elements of `t` at `indices` along `axis`.

    Args:
        indices: integers of any shape; it replaces `axis` in the shape of the result.
        available_memory_proportion: a hint for other hardware; recorded, no effect.
        zero_OOR: indices out of range give zeros; otherwise they count as the nearest in range,
            those of constants excepted.

    Raises:
        ValueError: `t` has no such axis, or the indices are not integers.
        IndexError: a constant has an index out of range, and `zero_OOR` is False.
    """
    return _emit_gather("gather", t, indices, axis, available_memory_proportion, zero_OOR)


def tied_gather(
    t: Tensor,
    indices: Tensor,
    axis: int = 0,
    available_memory_proportion: float | None = None,
    zero_OOR: bool = False,
) -> Tensor:
    """Gathers like `gather`; on IPUs other users of `t`, such as a matmul, decide its layout."""
    return _emit_gather("tied_gather", t, indices, axis, available_memory_proportion, zero_OOR)


def _emit_gather(
    op: str, t: Tensor, indices: Tensor, axis: int, proportion: float | None, zero_oor: bool
) -> Tensor:
    check_indices(op, indices)
    axis = normalize_axis(op, t, axis)
    if not zero_oor:
        check_constant_indices(op, indices, t.shape[axis])
    attrs = {"axis": axis, "zero_oor": bool(zero_oor), **as_hint_attribute(proportion)}
    return emit(_GATHER, [t, indices], attrs, names=[f"{op}_out"])[0]


def _grouped_gather(t: Any, indices: Any, **attrs: Any) -> Any:
    return jax.vmap(lambda x, i: _gather(x, i, **attrs))(t, indices)


_GROUPED_GATHER = define("groupedgather", _grouped_gather)


def groupedgather(
    t: Tensor,
    indices: Tensor,
    axis: int = 0,
    group_size: int | None = 1,
    available_memory_proportion: float | None = None,
    zero_OOR: bool = False,
) -> Tensor:
    """Gathers like `gather`, separately for each group.

    Args:
        t, indices: with more than one group, their first axis is the group.
        axis: axis of a group's part of `t` (so the group axis does not count).
        group_size: number of groups.

    Raises:
        ValueError: a first axis is not the number of groups, or no such axis.
        IndexError: as for `gather`.
    """
    if group_size in (None, 1):
        return gather(t, indices, axis, available_memory_proportion, zero_OOR)
    check_indices("groupedgather", indices)
    check_groups("groupedgather", group_size, t, indices)
    axis = normalize_axis("groupedgather", t, axis, extra_axes=-1)
    if not zero_OOR:
        check_constant_indices("groupedgather", indices, t.shape[axis + 1])
    attrs: dict[str, Any] = {
        "axis": axis,
        "zero_oor": bool(zero_OOR),
        **as_hint_attribute(available_memory_proportion),
    }
    return emit(_GROUPED_GATHER, [t, indices], attrs)[0]


def check_groups(op: str, groups: int | None, *tensors: Tensor) -> None:
    for t in tensors:
        if t.rank == 0 or t.shape[0] != groups:
            raise ValueError(
                f"{op}: the first axis of {t.id!r} of shape {t.shape} must be the group_size "
                f"{groups}"
            )


def check_indices(op: str, indices: Tensor) -> None:
    check_tensors(op, indices)
    if not indices.dtype.is_int:
        raise ValueError(f"{op}: indices {indices.id!r} must be integers, not {indices.dtype.name}")


# ---- scatter ------------------------------------------------------------------------------------
def element_indices(indices: Any, axis: int) -> tuple[Any, ...]:
    """Returns index arrays for all axes of the elements at `indices` along `axis`."""
    grids = jnp.meshgrid(*(jnp.arange(n) for n in indices.shape), indexing="ij", sparse=True)
    return tuple(indices.astype(jnp.int32) if i == axis else g for i, g in enumerate(grids))


def _scatter(
    t: Any, indices: Any, values: Any, axis: int, available_memory_proportion: float | None = None
) -> Any:
    if indices.shape != values.shape:
        raise ValueError(f"indices {indices.shape} and values {values.shape} differ in shape")
    if indices.ndim != t.ndim:
        raise ValueError(f"indices {indices.shape} must have the rank of the tensor {t.shape}")
    if t.dtype != values.dtype:
        raise TypeError(f"values are {values.dtype}, but the tensor is {t.dtype}: use ops.cast")
    where = indices_or_size(indices, t.shape[axis])
    return t.at[element_indices(where, axis)].set(values, mode="drop")


_SCATTER = define("scatter", _scatter)


def scatter(
    t: Tensor,
    indices: Tensor,
    values: Tensor,
    axis: int = 0,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """Returns `t` with elements overwritten: out[i][indices[i, j]][j] = values[i, j] for axis 1.

    Args:
        indices: integer positions along `axis`, of the shape of `values`. Values whose position is
            out of range are left out; where an element is named twice it is not defined which value
            stays.
        values: as many axes as `t`, none longer.

    Raises:
        ValueError: `t` has no such axis, or the indices are not integers.
        IndexError: a constant has an index out of range.
    """
    check_indices("scatter", indices)
    axis = normalize_axis("scatter", t, axis)
    check_constant_indices("scatter", indices, t.shape[axis])
    attrs = {"axis": axis, **as_hint_attribute(available_memory_proportion)}
    return emit(_SCATTER, [t, indices, values], attrs)[0]


# ---- one-hot and top-k --------------------------------------------------------------------------
def _onehot(t: Any, values: Any, num_classes: int, axis: int) -> Any:
    if values.shape != (2,):
        raise ValueError(f"values must be [off, on], but have shape {values.shape}")
    shape = [1] * (t.ndim + 1)
    shape[axis] = num_classes
    classes = jnp.arange(num_classes, dtype=jnp.int32).reshape(shape)
    hit = jnp.expand_dims(t.astype(jnp.int32), axis) == classes
    return jnp.where(hit, values[1], values[0])


_ONEHOT = define("onehot", _onehot)


def onehot(t: Tensor, num_classes: Tensor, values: Tensor, axis: int) -> Tensor:
    """Inserts a class axis: `values[1]` at the class index in `t`, `values[0]` elsewhere.

    Args:
        t: integer classes; out-of-range ones give `values[0]` only.
        num_classes: a constant with one element.
        values: [off, on]; its dtype is the result's.
        axis: where the new axis is in the result.

    Raises:
        ValueError: `num_classes` is no constant, or the result has no such axis.
    """
    if not isinstance(num_classes, Constant) or num_classes.nelms != 1:
        raise ValueError(f"onehot: num_classes {num_classes!r} must be a constant of one element")
    check_indices("onehot", t)
    count = int(num_classes._data.reshape(()))
    attrs = {"num_classes": count, "axis": normalize_axis("onehot", t, axis, extra_axes=1)}
    return emit(_ONEHOT, [t, values], attrs)[0]


def _topk(
    x: Any,
    k: int,
    axis: int,
    largest: bool,
    sorted: bool,
    available_memory_proportion: float | None = None,
) -> tuple[Any, Any]:
    check_arithmetic(x)
    rows = jnp.moveaxis(x, axis, -1)
    if largest:
        order = rows
    else:
        order = -rows if jnp.issubdtype(rows.dtype, jnp.floating) else ~rows
    _, indices = lax.top_k(order, k)
    values = jnp.take_along_axis(rows, indices, -1)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices.astype(jnp.int32), -1, axis)


def _topk_backward(dy: Any, indices: Any, shape: tuple[int, ...], axis: int) -> Any:
    return jnp.zeros(shape, dy.dtype).at[element_indices(indices, axis)].set(dy)


_TOPK_GRAD = define("topk_grad", _topk_backward)


def _topk_grad(ctx: Any, op: Any, dy: Tensor | None, _: Tensor | None) -> list[Tensor | None]:
    if dy is None:
        return [None]
    attrs = {"shape": op.inputs[0].shape, "axis": op.attrs["axis"]}
    return [emit(_TOPK_GRAD, [dy, ctx.fwd(op.outputs[1])], attrs)[0]]


_TOPK = define(
    "topk",
    _topk,
    grad=_topk_grad,
    result=lambda op: ("topk_out_value", "topk_out_indices"),
)


def topk(
    t: Tensor,
    k: int,
    axis: int,
    largest: bool,
    sorted: bool,
    available_memory_proportion: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the `k` largest (or smallest) elements along `axis`, and their indices as int32.

    Args:
        sorted: ask for the best first; they always are.

    Raises:
        ValueError: `t` has no such axis, or fewer than `k` elements along it.
    """
    axis = normalize_axis("topk", t, axis)
    if not 1 <= k <= t.shape[axis]:
        raise ValueError(f"topk: k={k} must be in [1, {t.shape[axis]}] for axis {axis} of {t.id!r}")
    attrs = {"k": int(k), "axis": axis, "largest": bool(largest), "sorted": bool(sorted)}
    values, indices = emit(_TOPK, [t], {**attrs, **as_hint_attribute(available_memory_proportion)})
    return values, indices
