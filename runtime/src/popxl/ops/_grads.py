"""Helpers that the gradient rules of several op families share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from popxl._ir.op_registry import define
from popxl.ops._emit import emit
from popxl.ops._numerics import float_op
from popxl.ops.placement import init
from popxl.tensor import Constant, constant

if TYPE_CHECKING:
    from popxl.tensor import Tensor


def scalar_like(value: float, t: Tensor) -> Constant:
    """Returns a scalar constant of the dtype of `t`."""
    return constant(value, t.dtype)


_DIVIDED = define("divided", float_op(lambda x, count: x / count), tags=("elementwise",))


def divide_by_count(t: Tensor, count: int) -> Tensor:
    """Returns `t` divided by a number of elements, as the gradient of a mean needs.

    Half types cannot hold that number, nor its reciprocal, so neither becomes a constant of the
    dtype of `t`.
    """
    return emit(_DIVIDED, [t], {"count": count})[0]


def zeros_like(t: Tensor) -> Tensor:
    """Returns zeros of the shape and dtype of `t`."""
    return init(t.shape, t.dtype, "zeros", "zero")
