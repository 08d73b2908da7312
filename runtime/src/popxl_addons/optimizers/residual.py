"""Weights of 24 or 32 bits: a 16-bit value, and a residual of 8 or 16 bits that rounding took."""

from __future__ import annotations

from typing import Any

import popxl
from popxl import ops
from popxl.custom import jax_op
from popxl_addons.optimizers import packed

_NO_GRAD = "variable updates are not differentiated"


@jax_op(name="residual_of_weight", no_grad=_NO_GRAD)
def _rest(low: Any, residual: Any) -> Any:
    return packed.rest_of(low, residual)


@jax_op(name="split_weight", no_grad=_NO_GRAD)
def _split(weight: Any, low: Any, residual: Any) -> Any:
    bits = 8 * residual.dtype.itemsize
    return packed.split(weight, low.dtype, bits)


def joined(var: popxl.Tensor, residual: popxl.Tensor) -> popxl.Tensor:
    """The whole weight, float32, from a 16-bit variable and its residual, int8 or int16."""
    return ops.cast(var, popxl.float32) + _rest(var, residual)


def keep_split(var: popxl.TensorByRef, residual: popxl.TensorByRef, weight: popxl.Tensor) -> None:
    """Store a float32 weight in a 16-bit variable and its residual."""
    low, rest = _split(weight, var, residual)
    ops.var_updates.copy_var_update_(var, low)
    ops.var_updates.copy_var_update_(residual, rest)
