"""Weights of 24 or 32 bits: a 16-bit variable plus an 8- or 16-bit rounding residual."""

from __future__ import annotations

from typing import Any

import popxl
from popxl import ops
from popxl.custom import jax_op
from popxl_addons.optimizers import state_8bit

_NO_GRAD = "variable updates are not differentiated"


@jax_op(name="residual_of_weight", no_grad=_NO_GRAD)
def _dequantize_residual(low: Any, residual: Any) -> Any:
    return state_8bit.dequantize_residual(low, residual)


@jax_op(name="split_weight", no_grad=_NO_GRAD)
def _split_weight(weight: Any, low: Any, residual: Any) -> Any:
    bits = 8 * residual.dtype.itemsize
    return state_8bit.split_weight(weight, low.dtype, bits)


def join_weight(var: popxl.Tensor, residual: popxl.Tensor) -> popxl.Tensor:
    """Add a 16-bit variable and its int8 or int16 residual: a float32 weight."""
    return ops.cast(var, popxl.float32) + _dequantize_residual(var, residual)


def split_weight(
    weight: popxl.Tensor, var: popxl.Tensor, residual: popxl.Tensor
) -> tuple[popxl.Tensor, popxl.Tensor]:
    """Split a float32 weight into a value and a residual of the dtypes of `var` and `residual`."""
    low, new_residual = _split_weight(weight, var, residual)
    return low, new_residual
