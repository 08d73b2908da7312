"""Activation functions: relu, tanh, gelu, softmax and others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from popxl._ir.op_registry import define
from popxl.ops._args import normalize_axis
from popxl.ops._emit import emit
from popxl.ops._grads import scalar_like
from popxl.ops._numerics import (
    check_floating,
    check_not_empty,
    float_op,
    number_op,
    upcast_half_types,
)
from popxl.ops._reductions import max_over, sum_over, traced_platform
from popxl.ops._tensor_only_ops import ELEMENTWISE, unary_op
from popxl.ops.logic import greater, where
from popxl.tensor import Tensor


def _relu_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    # From the output, which `relu_` leaves, and not the input, which it overwrites.
    zero = scalar_like(0, dy)
    return [where(greater(ctx.fwd(op.outputs[0]), zero), dy, zero)]


_RELU = define("relu", number_op(jax.nn.relu), grad=_relu_grad, tags=ELEMENTWISE)


def _gelu_array(x: Any) -> Any:
    return jax.nn.gelu(x, approximate=True)


def _gelu_grad_array(x: Any, dy: Any) -> Any:
    """Returns the gradient of gelu's input.

    Elsewhere than on CPUs it is by gelu(x) = x sigmoid(2 u): XLA for GPUs would find the tanh of
    both passes in one program, and write it to memory in float32.
    """
    if traced_platform() in (None, "cpu"):
        return jax.vjp(float_op(_gelu_array), x)[1](dy)[0]
    wide, scale, cubic = upcast_half_types(x), (2 / jnp.pi) ** 0.5, 0.044715
    s = jax.nn.sigmoid(2 * scale * (wide + cubic * wide**3))
    slope = s + wide * s * (1 - s) * 2 * scale * (1 + 3 * cubic * wide**2)
    return (upcast_half_types(dy) * slope).astype(x.dtype)


_GELU_GRAD = define("gelu_grad", _gelu_grad_array, tags=ELEMENTWISE)


def _gelu_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    return [emit(_GELU_GRAD, [ctx.fwd(op.inputs[0]), dy])[0]]


_GELU = define("gelu", float_op(_gelu_array), grad=_gelu_grad, tags=ELEMENTWISE)
_GELUERF = define(
    "geluerf", float_op(lambda x: jax.nn.gelu(x, approximate=False)), tags=ELEMENTWISE
)
_SWISH = define("swish", float_op(jax.nn.silu), tags=ELEMENTWISE)

relu = unary_op(_RELU, "max(t, 0). The gradient at 0 is 0.")
relu_ = unary_op(_RELU, "As `relu`, in place.", inplace=0)
gelu = unary_op(
    _GELU, "Gaussian error linear unit, by the tanh approximation of Hendrycks and Gimpel (2016)."
)
gelu_ = unary_op(_GELU, "As `gelu`, in place.", inplace=0)
geluerf = unary_op(_GELUERF, "Gaussian error linear unit, exact: t * (1 + erf(t / sqrt(2))) / 2.")
geluerf_ = unary_op(_GELUERF, "As `geluerf`, in place.", inplace=0)
swish = unary_op(_SWISH, "t * sigmoid(t), also called SiLU.")
swish_ = unary_op(_SWISH, "As `swish`, in place.", inplace=0)


def _tanh_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    y = ctx.fwd(op.outputs[0])
    return [dy * (scalar_like(1, y) - y * y)]


tanh = unary_op(
    define("tanh", float_op(jnp.tanh), grad=_tanh_grad, tags=ELEMENTWISE),
    "Hyperbolic tangent of each element.",
)


def _softmax_backward(y: Any, dy: Any, axis: int) -> Any:
    check_floating(y)
    wide = upcast_half_types(y)
    product = wide * upcast_half_types(dy)
    return (product - wide * sum_over(product, axis, keepdims=True)).astype(y.dtype)


_SOFTMAX_GRAD = define("softmax_grad", _softmax_backward, dtypes="same")


def _softmax_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    return [emit(_SOFTMAX_GRAD, [ctx.fwd(op.outputs[0]), dy], op.attrs)[0]]


def _softmax(x: Any, axis: int) -> Any:
    check_not_empty(x, axis)
    exponentials = jnp.exp(x - max_over(x, axis, keepdims=True))
    return exponentials / sum_over(exponentials, axis, keepdims=True)


_SOFTMAX = define("softmax", float_op(_softmax), grad=_softmax_grad)


def softmax(t: Tensor, axis: int) -> Tensor:
    """Returns exp(t) normalized to sum 1 along `axis`; computed in float32 for half types.

    Raises:
        ValueError: `t` has no such axis.
    """
    return emit(_SOFTMAX, [t], {"axis": normalize_axis("softmax", t, axis)})[0]
