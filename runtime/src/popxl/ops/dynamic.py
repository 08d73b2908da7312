"""Slices and updates at start offsets that are tensors, known at run time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from popxl._ir.op_registry import OpDef, define
from popxl.ops._args import normalize_axis
from popxl.ops._emit import emit
from popxl.ops._index_bounds import as_int32, check_constant_indices
from popxl.ops.gathering import check_indices
from popxl.ops.placement import init, unfused_update
from popxl.tensor import Tensor


def _start_indices(index: Any, axes: tuple[int, ...], rank: int) -> list[Any]:
    flat = as_int32(index.reshape(-1))
    if flat.shape[0] != len(axes):
        raise ValueError(f"index has {flat.shape[0]} elements for {len(axes)} axes")
    zero = jnp.zeros((), jnp.int32)
    return [flat[axes.index(i)] if i in axes else zero for i in range(rank)]


def _dynamic_slice(
    t: Any, index: Any, axes: tuple[int, ...], sizes: tuple[int, ...], no_overlap: bool
) -> Any:
    shape = list(t.shape)
    for axis, size in zip(axes, sizes, strict=True):
        shape[axis] = size
    starts = _start_indices(index, axes, t.ndim)
    return lax.dynamic_slice(t, starts, shape, allow_negative_indices=False)


def _dynamic_slice_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor | None]:
    t, index = op.inputs
    zeros = init(t.shape, t.dtype)
    return [emit(_DYNAMIC_UPDATE, [zeros, ctx.fwd(index), dy], op.attrs)[0], None]


_DYNAMIC_SLICE = define("dynamic_slice", _dynamic_slice, grad=_dynamic_slice_grad)


def _emit(
    defn: OpDef, inputs: list[Tensor], axes: Iterable[int], sizes: Iterable[int], no_overlap: bool,
    inplace: int | None = None,
) -> Tensor:  # fmt: skip
    """Adds a slice op with a dynamic start offset, after checks of its axes and sizes.

    `inputs`: the sliced tensor, the start offset, and for an update its values.
    """
    op, (t, index, *_) = defn.name, inputs
    check_indices(op, index)
    axes_, sizes_ = tuple(normalize_axis(op, t, a) for a in axes), tuple(int(s) for s in sizes)
    if len(axes_) != len(sizes_) or len(set(axes_)) != len(axes_):
        raise ValueError(f"{op}: axes {axes_} and sizes {sizes_} must pair up, each axis once")
    for axis, size in zip(axes_, sizes_, strict=True):
        if not 0 <= size <= t.shape[axis]:
            raise ValueError(
                f"{op}: size {size} exceeds axis {axis} of {t.id!r} of shape {t.shape}"
            )
    if index.nelms == len(axes_):
        last_starts = [t.shape[a] - n + 1 for a, n in zip(axes_, sizes_, strict=True)]
        check_constant_indices(op, index, np.reshape(last_starts, index.shape))
    attrs = {"axes": axes_, "sizes": sizes_, "no_overlap": bool(no_overlap)}
    return emit(defn, inputs, attrs, inplace=inplace)[0]


def dynamic_slice(
    t: Tensor, index: Tensor, axes: Iterable[int], sizes: Iterable[int], no_overlap: bool
) -> Tensor:
    """Returns the slice of `t` with start offset `index` and `sizes` along `axes`.

    Args:
        index: integer start for each of the axes; one out of range counts as the nearest from which
            the part fits.
        no_overlap: a promise, which makes gradients cheaper on IPUs; recorded, no effect.

    Raises:
        ValueError: no such axis, or a size larger than the axis.
        IndexError: a constant's start is one from which the part does not fit.
    """
    return _emit(_DYNAMIC_SLICE, [t, index], axes, sizes, no_overlap)


def _dynamic_update(
    t: Any,
    index: Any,
    update: Any,
    axes: tuple[int, ...],
    sizes: tuple[int, ...],
    no_overlap: bool,
) -> Any:
    if t.dtype != update.dtype:
        raise TypeError(f"the update is {update.dtype}, but the tensor is {t.dtype}: use ops.cast")
    if update.ndim != t.ndim:
        raise ValueError(f"the update {update.shape} must have the rank of the tensor {t.shape}")
    for axis, size in zip(axes, sizes, strict=True):
        if update.shape[axis] != size:
            raise ValueError(
                f"the update has shape {update.shape}, but axis {axis} has size {size}"
            )
    starts = _start_indices(index, axes, t.ndim)
    return lax.dynamic_update_slice(t, unfused_update(update), starts, allow_negative_indices=False)


def _dynamic_update_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor | None]:
    index, update = ctx.fwd(op.inputs[1]), op.inputs[2]
    zeros = init(update.shape, update.dtype)
    return [
        emit(_DYNAMIC_UPDATE, [dy, index, zeros], op.attrs)[0],
        None,
        emit(_DYNAMIC_SLICE, [dy, index], op.attrs)[0],
    ]


_DYNAMIC_UPDATE = define(
    "dynamic_update",
    _dynamic_update,
    grad=_dynamic_update_grad,
    inplace_result="dynamicupdateinplace_out",
)


def dynamic_update(
    t: Tensor,
    index: Tensor,
    t_update: Tensor,
    axes: Iterable[int],
    sizes: Iterable[int],
    no_overlap: bool,
) -> Tensor:
    """Returns a copy of `t` with the slice at start offset `index` replaced by `t_update`.

    Args:
        index: integer start for each of the axes; one out of range counts as the nearest from which
            the part fits.
        t_update: new values: the shape of `t`, but `sizes` along `axes`.
        no_overlap: as for `dynamic_slice`.

    Raises:
        ValueError: no such axis, or a size larger than the axis.
        IndexError: a constant's start is one from which the part does not fit.
    """
    return _emit(_DYNAMIC_UPDATE, [t, index, t_update], axes, sizes, no_overlap)


def dynamic_update_(
    t: Tensor,
    index: Tensor,
    t_update: Tensor,
    axes: Iterable[int],
    sizes: Iterable[int],
    no_overlap: bool,
) -> Tensor:
    """Updates a slice of `t` in place, like `dynamic_update`."""
    return _emit(_DYNAMIC_UPDATE, [t, index, t_update], axes, sizes, no_overlap, inplace=0)
