"""`tensor[key]`: Python indexing as slice and gather ops."""

from __future__ import annotations

from typing import Any

import numpy as np

from popxl import dtypes
from popxl.ops.gathering import gather
from popxl.ops.logic import where
from popxl.ops.shape import squeeze
from popxl.ops.slicing import slice as slice_of
from popxl.tensor import Tensor, constant


def getitem(t: Tensor, key: Any) -> Tensor:
    """Slices, gathers or masks `t` by a Python index (`Tensor.__getitem__`)."""
    if isinstance(key, (bool, np.bool_)):
        raise TypeError(
            f"a tensor cannot be indexed with {key!r}: masks are bool tensors or arrays"
        )
    if isinstance(key, (int, np.integer, slice)) or key is Ellipsis:
        key = (key,)
    if isinstance(key, tuple):
        return _slice_axes(t, key)
    if isinstance(key, Tensor):
        return _apply_mask(t, key) if key.dtype is dtypes.bool else _gather_axis_0(t, key)
    array = np.asarray(key)
    if array.dtype == np.bool_:
        return _apply_mask(t, constant(array))
    if np.issubdtype(array.dtype, np.integer):
        return _gather_axis_0(t, constant(_resolve_negative_indices(t, array), dtypes.int32))
    raise TypeError(f"a tensor cannot be indexed with {key!r}")


def _gather_axis_0(t: Tensor, indices: Tensor) -> Tensor:
    if not indices.dtype.is_int:
        raise TypeError(f"index tensors must be integer or bool, but {indices.id!r} is not")
    return gather(t, indices)


def _resolve_negative_indices(t: Tensor, indices: np.ndarray) -> np.ndarray:
    """Returns constant indices with negative ones converted to count from the front."""
    n = t.shape[0] if t.rank else 0
    outside = (indices < -n) | (indices >= n)
    if outside.any():
        raise IndexError(
            f"getitem: index {indices[outside][0]} is out of range for axis 0 of size {n}"
        )
    return np.where(indices < 0, indices + n, indices)


def _apply_mask(t: Tensor, mask: Tensor) -> Tensor:
    return where(mask, t, constant(0, t.dtype))


def _slice_axes(t: Tensor, key: tuple[Any, ...]) -> Tensor:
    if any(k is Ellipsis for k in key):
        at = key.index(Ellipsis)
        key = key[:at] + (slice(None),) * (t.rank - len(key) + 1) + key[at + 1 :]
    if len(key) > t.rank:
        raise ValueError(f"getitem: {len(key)} indices for {t.id!r}, which has {t.rank} axes")
    starts: list[int | None] = []
    stops: list[int | None] = []
    steps: list[int | None] = []
    axes: list[int] = []
    dropped: list[int] = []  # axes indexed by an integer
    for axis, k in enumerate(key):
        if isinstance(k, (int, np.integer)):
            n = t.shape[axis]
            if not -n <= k < n:
                raise IndexError(f"getitem: index {k} is out of range for axis {axis} of size {n}")
            start = int(k) % n
            part = (start, start + 1, 1)
            dropped.append(axis)
        elif isinstance(k, slice):
            if k == slice(None):
                continue
            part = (k.start, k.stop, k.step)
        else:
            raise TypeError(f"index {k!r} of axis {axis} must be an integer or a slice")
        axes.append(axis)
        for values, value in zip((starts, stops, steps), part, strict=True):
            values.append(value)
    out = slice_of(t, starts, stops, steps, axes) if axes else t
    return squeeze(out, dropped) if dropped else out
