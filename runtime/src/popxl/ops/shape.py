"""Ops that move elements: reshape, transpose, slice, split, concatenate.

The names that end in `_` return views: reading one reads its owner, writing one writes the owner.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from popxl._ir.op_registry import define
from popxl.errors import popart_exception
from popxl.ops._args import check_tensors, normalize_axis
from popxl.ops._emit import emit
from popxl.ops._grads import zeros_like
from popxl.ops._strided_regions import inverse_permutation, merge_regions
from popxl.tensor import Tensor


# ---- reshape ------------------------------------------------------------------------------------
def _reshape_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    return [reshape(dy, op.inputs[0].shape)]


_RESHAPE = define(
    "reshape",
    lambda x, shape: x.reshape(shape),
    grad=_reshape_grad,
    view_write=lambda inputs, value, shape: (value.reshape(inputs[0].shape),),
    merge=lambda first, then: (then.defn, then.attrs) if first.defn is then.defn else None,
    tags=("movement",),
    result="{t}_reshaped",
)


def reshape_handle_negative_axis(t: Tensor, shape: Iterable[int]) -> tuple[int, ...]:
    """Returns `shape` with a single -1 replaced by the size that fits the elements of `t`.

    Raises:
        ValueError: more than one -1, another negative size, or a shape that does not fit.
    """
    check_tensors("reshape", t)
    dims = tuple(int(d) for d in shape)
    if dims.count(-1) > 1 or builtins.any(d < -1 for d in dims):
        raise ValueError(f"reshape: shape {dims} of {t.id!r} may have one -1 and no other negative")
    if -1 in dims:
        rest = -math.prod(dims)
        if rest == 0 or t.nelms % rest:
            raise ValueError(f"reshape: {t.id!r} of shape {t.shape} cannot be reshaped to {dims}")
        dims = tuple(t.nelms // rest if d == -1 else d for d in dims)
    if math.prod(dims) != t.nelms:
        raise ValueError(f"reshape: {t.id!r} of shape {t.shape} cannot be reshaped to {dims}")
    return dims


def reshape(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns the elements in another shape, in C order.

    Args:
        shape: at most one size may be -1; it follows from the others.

    Raises:
        ValueError: the number of elements would change.
    """
    return emit(_RESHAPE, [t], {"shape": reshape_handle_negative_axis(t, shape)})[0]


def reshape_(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshapes a tensor like `reshape`, as a view."""
    return emit(_RESHAPE, [t], {"shape": reshape_handle_negative_axis(t, shape)}, view=True)[0]


def flatten(t: Tensor) -> Tensor:
    """Returns the elements along one axis, in C order."""
    return reshape(t, (t.nelms,))


def flatten_(t: Tensor) -> Tensor:
    """Flattens a tensor like `flatten`, as a view."""
    return reshape_(t, (t.nelms,))


def squeeze(t: Tensor, axes: list[int] | None = None) -> Tensor:
    """Removes axes of size 1.

    Args:
        axes: the axes; default: all of size 1.

    Raises:
        ValueError: an axis has another size.
    """
    if axes is None:
        drop = {i for i, n in enumerate(t.shape) if n == 1}
    else:
        drop = {normalize_axis("squeeze", t, a) for a in axes}
    wrong = [a for a in sorted(drop) if t.shape[a] != 1]
    if wrong:
        raise ValueError(f"squeeze: axes {wrong} of {t.id!r} of shape {t.shape} have no size 1")
    return reshape(t, tuple(n for i, n in enumerate(t.shape) if i not in drop))


# ---- transpose ----------------------------------------------------------------------------------
def _transpose_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    return [transpose(dy, inverse_permutation(op.attrs["permutation"]))]


_TRANSPOSE = define(
    "transpose",
    lambda x, permutation: jnp.transpose(x, permutation),
    grad=_transpose_grad,
    view_write=lambda inputs, value, permutation: (
        jnp.transpose(value, inverse_permutation(permutation)),
    ),
    merge=merge_regions,
    tags=("movement",),
    result="{t}_T",
)


def _permutation(t: Tensor, permutation: Iterable[int] | None) -> tuple[int, ...]:
    if permutation is None:
        return tuple(reversed(range(t.rank)))
    axes = tuple(normalize_axis("transpose", t, a) for a in permutation)
    if sorted(axes) != list(range(t.rank)):
        raise ValueError(
            f"transpose: permutation {axes} does not name each axis of {t.id!r} of shape "
            f"{t.shape} once"
        )
    return axes


def transpose(t: Tensor, permutation: tuple[int, ...] | None = None) -> Tensor:
    """Permutes the axes: axis i of the result is axis `permutation[i]` of `t`.

    Args:
        permutation: negative axes count from the end; default: reverse the axes.

    Raises:
        ValueError: it does not name each axis once.
    """
    return emit(_TRANSPOSE, [t], {"permutation": _permutation(t, permutation)})[0]


def transpose_(t: Tensor, permutation: tuple[int, ...] | None = None) -> Tensor:
    """Permutes the axes like `transpose`, as a view."""
    return emit(_TRANSPOSE, [t], {"permutation": _permutation(t, permutation)}, view=True)[0]


# ---- split and concatenate ----------------------------------------------------------------------
def _split_by_sizes(x: Any, sizes: Sequence[int], axis: int) -> tuple[Any, ...]:
    ends = np.cumsum(sizes).tolist()
    return tuple(
        lax.slice_in_dim(x, end - size, end, axis=axis)
        for end, size in zip(ends, sizes, strict=True)
    )


def _concat_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    axis = op.attrs["axis"]
    return split(dy, [t.shape[axis] for t in op.inputs], axis)


_CONCAT = define(
    "concat",
    lambda *xs, axis: lax.concatenate(xs, axis),
    grad=_concat_grad,
    dtypes="same",
    view_write=lambda inputs, value, axis: _split_by_sizes(
        value, [x.shape[axis] for x in inputs], axis
    ),
    tags=("movement",),
)


def _concat(ts: Iterable[Tensor], axis: int, view: bool) -> Tensor:
    if isinstance(ts, Tensor):
        raise TypeError(f"concat takes a list of tensors, but got the tensor {ts.id!r}")
    tensors = list(ts)
    if not tensors:
        raise ValueError("concat: at least one tensor is needed")
    attrs = {"axis": normalize_axis("concat", tensors[0], axis)}
    return emit(_CONCAT, tensors, attrs, view=view)[0]


def concat(ts: Iterable[Tensor], axis: int = 0) -> Tensor:
    """Concatenates tensors along an axis; the other sizes and the dtypes must be equal.

    Raises:
        ValueError: no tensors, or the first has no such axis.
    """
    return _concat(ts, axis, view=False)


def concat_(ts: Iterable[Tensor], axis: int = 0) -> Tensor:
    """Concatenates tensors like `concat`, as a view of all `ts`."""
    return _concat(ts, axis, view=True)


def _split_grad(ctx: Any, op: Any, *dys: Tensor | None) -> list[Tensor]:
    known = [zeros_like(y) if dy is None else dy for y, dy in zip(op.outputs, dys, strict=True)]
    return [concat(known, op.attrs["axis"])]


_SPLIT = define(
    "split",
    lambda x, sizes, axis: _split_by_sizes(x, sizes, axis),
    grad=_split_grad,
    tags=("movement",),
    result=lambda op: [f"{{t}}_split_{i}" for i in range(len(op.attrs["sizes"]))],
)


def split(t: Tensor, splits: int | list[int], axis: int = 0) -> list[Tensor]:
    """Splits a tensor along an axis.

    Args:
        splits: the number of equal parts, or the size of each.

    Raises:
        ValueError: the axis has no such number of equal parts.
        popart_exception: the sizes do not add up to the axis.
    """
    axis = normalize_axis("split", t, axis)
    size = t.shape[axis]
    if isinstance(splits, int):
        if splits < 1 or size % splits:
            raise ValueError(
                f"split: axis {axis} of {t.id!r} of shape {t.shape} has no {splits} equal parts"
            )
        sizes = (size // splits,) * splits
    else:
        sizes = tuple(int(n) for n in splits)
    if builtins.sum(sizes) != size or builtins.any(n < 0 for n in sizes):
        raise popart_exception(
            f"split: parts {sizes} do not add up to axis {axis} of {t.id!r} of shape {t.shape}"
        )
    return list(emit(_SPLIT, [t], {"sizes": sizes, "axis": axis}))
