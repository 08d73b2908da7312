"""Pieces of gradient rules that several families need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from popxl import ops
from popxl._core.emit import emit
from popxl._core.opdef import define
from popxl.ops._numerics import floats
from popxl.tensor import Constant, constant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from popxl.tensor import Tensor


def sum_to(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo broadcasting: sum `grad` over the axes along which `shape` was broadcast."""
    shape = tuple(shape)
    if grad.shape == shape:
        return grad
    extra = grad.rank - len(shape)
    axes = list(range(extra))
    axes += [extra + i for i, n in enumerate(shape) if n == 1 and grad.shape[extra + i] != 1]
    total = ops.sum(grad, axes, keepdims=False) if axes else grad
    return total if total.shape == shape else ops.reshape(total, shape)


def sum_to_like(grad: Tensor, t: Tensor) -> Tensor:
    """As `sum_to`, in the shape and dtype of `t`."""
    return sum_to(grad if grad.dtype is t.dtype else ops.cast(grad, t.dtype), t.shape)


def scalar_like(value: float, t: Tensor) -> Constant:
    """A scalar constant of the dtype of `t`."""
    return constant(value, t.dtype)


_DIVIDED = define("divided", floats(lambda x, count: x / count), tags=("elementwise",))


def divided(t: Tensor, count: int) -> Tensor:
    """`t` over a number of elements. Half types have no room for that number, nor for its
    reciprocal, so neither becomes a constant of the dtype of `t`."""
    return emit(_DIVIDED, [t], {"count": count})[0]


def zeros_like(t: Tensor) -> Tensor:
    """Zeros of the shape and dtype of `t`."""
    return ops.init(t.shape, t.dtype, "zeros", "zero")
