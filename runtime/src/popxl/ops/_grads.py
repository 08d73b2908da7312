"""Pieces of gradient rules that several families need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from popxl._ir.op_registry import define
from popxl.ops._emit import emit
from popxl.ops._numerics import floats
from popxl.ops.placement import init
from popxl.tensor import Constant, constant

if TYPE_CHECKING:
    from popxl.tensor import Tensor


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
    return init(t.shape, t.dtype, "zeros", "zero")
