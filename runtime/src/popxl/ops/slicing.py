"""Static slices of tensors, given by start, stop and step for each axis.

An op stores the region that it takes (`popxl.ops._strided_regions`).
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from jax import lax

from popxl._ir.op_registry import define
from popxl.ops._args import check_same_length, normalize_axis
from popxl.ops._emit import emit
from popxl.ops._strided_regions import (
    Region,
    merge_regions,
    read_region,
    with_positive_steps,
    write_region,
)
from popxl.tensor import Tensor

INT_MIN = -(2**31)
INT_MAX = 2**31 - 1

_Bound = int | Sequence[int | None] | None


# ---- meaning ------------------------------------------------------------------------------------
def _pad_gradient(dy: Any, region: Region, shape: tuple[int, ...]) -> Any:
    up, reverse = with_positive_steps(region)
    part = lax.rev(dy, reverse) if reverse else dy
    padding = [
        (first, n - (first + (count - 1) * step + 1) if count else n - first, step - 1)
        for (first, count, step), n in zip(up, shape, strict=True)
    ]
    return lax.pad(part, lax.full((), 0, dy.dtype), padding)


_SLICE_GRAD = define("slice_grad", _pad_gradient)


def _slice_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    attrs = {"region": op.attrs["region"], "shape": op.inputs[0].shape}
    return [emit(_SLICE_GRAD, [dy], attrs)[0]]


_SLICE = define(
    "slice",
    read_region,
    grad=_slice_grad,
    view_write=write_region,
    merge=merge_regions,
    tags=("movement",),
)


# ---- arguments ----------------------------------------------------------------------------------
def _bounds_as_list(values: _Bound) -> list[int | None] | None:
    """Returns a slice bound given as a list as integers; None if it is one number for all axes."""
    return None if values is None or isinstance(values, Integral) else list(values)  # type: ignore[arg-type]


def _bounds_per_axis(values: _Bound, count: int) -> list[int | None]:
    """Returns one bound for each sliced axis, as Python integers."""
    bounds = _bounds_as_list(values)
    if bounds is None:
        bounds = [values] * count  # type: ignore[list-item]
    return [None if v is None else int(v) for v in bounds]


def process_args(
    start: _Bound = None,
    stop: _Bound = None,
    step: _Bound = None,
    axis: int | Sequence[int] | None = None,
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Returns starts, stops, steps and axes of a slice, as integer lists of one length.

    Missing bounds become the extremes of int32, which the slice clips to the tensor.

    Raises:
        ValueError: lists of different lengths, or a step of 0.
    """
    given = {"start": start, "stop": stop, "step": step, "axis": axis}
    lists = {name: _bounds_as_list(values) for name, values in given.items()}
    check_same_length("slice", **lists)
    count = next((len(values) for values in lists.values() if values is not None), 1)
    steps = [1 if s is None else s for s in _bounds_per_axis(step, count)]
    if 0 in steps:
        raise ValueError(f"slice: step {step} must not be 0")
    up = [s > 0 for s in steps]
    starts = [
        (0 if rising else INT_MAX) if s is None else s
        for s, rising in zip(_bounds_per_axis(start, count), up, strict=True)
    ]
    stops = [
        (INT_MAX if rising else INT_MIN) if s is None else s
        for s, rising in zip(_bounds_per_axis(stop, count), up, strict=True)
    ]
    axes = [i if a is None else a for i, a in enumerate(_bounds_per_axis(axis, count))]
    return starts, stops, steps, axes


def _slice_region(t: Tensor, args: Iterable[list[int]]) -> Region:
    region = [(0, n, 1) for n in t.shape]
    for start, stop, step, given in zip(*args, strict=True):
        axis = normalize_axis("slice", t, given)
        taken = range(*builtins.slice(start, stop, step).indices(t.shape[axis]))
        region[axis] = (taken.start if taken else 0, len(taken), step)
    return tuple(region)


def _emit_slice(
    t: Tensor, start: _Bound, stop: _Bound, step: _Bound, axis: Any, view: bool = False
) -> Tensor:
    if start is None and stop is None and step is None:
        return t
    region = _slice_region(t, process_args(start, stop, step, axis))
    return emit(_SLICE, [t], {"region": region}, view=view)[0]


def slice(
    t: Tensor,
    start: int | list[int | None] | None = None,
    stop: int | list[int | None] | None = None,
    step: int | list[int | None] | None = None,
    axis: int | list[int] | None = None,
) -> Tensor:
    """Slices along some axes by start, stop and step, as Python slices do.

    Without any of them it is `t` itself.

    Args:
        start, stop, step: one number or one for each axis; None as in a Python slice.
        axis: the axes sliced; default: the first ones.

    Raises:
        ValueError: lists of different lengths, a step of 0, or no such axis.
    """
    return _emit_slice(t, start, stop, step, axis)


def slice_(
    t: Tensor,
    start: int | list[int | None] | None = None,
    stop: int | list[int | None] | None = None,
    step: int | list[int | None] | None = None,
    axis: int | list[int] | None = None,
) -> Tensor:
    """Slices a tensor like `slice`, as a view."""
    return _emit_slice(t, start, stop, step, axis, view=True)


def subsample(t: Tensor, strides: int | Iterable[int]) -> Tensor:
    """Returns every `strides`-th element along each axis.

    Args:
        strides: one for each of the first axes; the others are kept as they are. A number is that
            of the first axis.

    Raises:
        ValueError: more strides than axes, or a stride below 1.
    """
    steps = [strides] if isinstance(strides, int) else list(strides)
    if len(steps) > t.rank or builtins.any(s < 1 for s in steps):
        raise ValueError(
            f"subsample: strides {steps} must be positive numbers for axes of {t.id!r} of shape "
            f"{t.shape}"
        )
    steps += [1] * (t.rank - len(steps))
    region = tuple((0, -(-n // s), s) for n, s in zip(t.shape, steps, strict=True))
    return emit(_SLICE, [t], {"region": region}, names=["subsample_out"])[0]
