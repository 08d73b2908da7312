"""Element-wise arithmetic of two or more tensors, with numpy broadcasting."""

# ruff: noqa: N803 - names of PopXL's arguments
from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from popxl._ir.op_registry import NoGrad, define
from popxl.ops._emit import emit
from popxl.ops._numerics import check_arithmetic, number_op, upcast_half_types
from popxl.ops._scalars import emit_with_scalars, with_scalars
from popxl.ops._tensor_only_ops import ELEMENTWISE, binary_op
from popxl.ops.elementwise import negate
from popxl.ops.reduction import sum_to
from popxl.tensor import Tensor
from popxl.utils import check_range

if TYPE_CHECKING:
    from collections.abc import Callable

    from popxl.tensor import TensorLike

Grads = list[Tensor | None]
_ALIKE = "Shapes broadcast; the dtypes must be equal."


# ---- add and subtract ---------------------------------------------------------------------------
def _add_grad(ctx: Any, op: Any, dy: Tensor) -> Grads:
    return [sum_to(dy, t.shape) if ctx.needs(op, i) else None for i, t in enumerate(op.inputs)]


_ADD = define(
    "add",
    number_op(jnp.add),
    grad=_add_grad,
    dtypes="same",
    tags=ELEMENTWISE,
    inplace_result="add_lhs_inplace_out",
)
add = binary_op(_ADD, f"lhs + rhs. {_ALIKE}")
add_ = binary_op(
    _ADD, "lhs += rhs, in place. `rhs` must broadcast to the shape of `lhs`.", inplace=0
)


def _sub_grad(ctx: Any, op: Any, dy: Tensor) -> Grads:
    lhs, rhs = op.inputs
    return [
        sum_to(dy, lhs.shape) if ctx.needs(op, 0) else None,
        negate(sum_to(dy, rhs.shape)) if ctx.needs(op, 1) else None,
    ]


sub = binary_op(
    define("sub", number_op(jnp.subtract), grad=_sub_grad, dtypes="same", tags=ELEMENTWISE),
    f"lhs - rhs. {_ALIKE}",
)


# ---- multiply and divide ------------------------------------------------------------------------
def _mul_grad(ctx: Any, op: Any, dy: Tensor) -> Grads:
    lhs, rhs = op.inputs
    return [
        sum_to(mul(dy, ctx.fwd(rhs)), lhs.shape) if ctx.needs(op, 0) else None,
        sum_to(mul(dy, ctx.fwd(lhs)), rhs.shape) if ctx.needs(op, 1) else None,
    ]


mul = binary_op(
    define("mul", number_op(jnp.multiply), grad=_mul_grad, dtypes="same", tags=ELEMENTWISE),
    f"lhs * rhs. {_ALIKE}",
)


def _div_grad(ctx: Any, op: Any, dy: Tensor) -> Grads:
    lhs, rhs = op.inputs
    scaled = div(dy, ctx.fwd(rhs))
    return [
        sum_to(scaled, lhs.shape) if ctx.needs(op, 0) else None,
        negate(sum_to(mul(scaled, ctx.fwd(op.outputs[0])), rhs.shape))
        if ctx.needs(op, 1)
        else None,
    ]


def _divide_integers(divide: Any, x: Any, y: Any, by_zero: Callable[[Any], Any]) -> Any:
    """Divides integers, hiding constant division by zero from XLA, whose compiler crashes on it.

    The result is then that of XLA's devices.
    """
    x, y = jnp.broadcast_arrays(x, y)
    if jnp.issubdtype(y.dtype, jnp.floating):
        return divide(x, y)
    return jnp.where(y == 0, by_zero(x), divide(x, jnp.where(y == 0, jnp.ones_like(y), y)))


def _div(x: Any, y: Any) -> Any:
    return _divide_integers(lax.div, x, y, lambda x: ~jnp.zeros_like(x))


div = binary_op(
    define("div", number_op(_div), grad=_div_grad, dtypes="same", tags=ELEMENTWISE),
    "lhs / rhs; integers divide towards zero, and over zero give -1, or the largest number of an "
    f"unsigned type. {_ALIKE}",
)


def _fmod(x: Any, y: Any) -> Any:
    return _divide_integers(lax.rem, x, y, lambda x: x)


fmod = binary_op(
    define("fmod", number_op(_fmod), dtypes="same", tags=ELEMENTWISE),
    "Remainder of lhs / rhs with the sign of `lhs`, as C's fmod; of integers over zero, `lhs`.",
)
_POW = define("pow", number_op(jnp.power), dtypes="same", tags=ELEMENTWISE)


def pow(t: Tensor, e: float | int | TensorLike) -> Tensor:
    """Returns `t` to the power `e`, element-wise.

    Args:
        e: exponent; a tensor of the dtype of `t`, or host data, which is converted to it.
    """
    return emit(_POW, [t, t._ensure_tensor(e)])[0]


# ---- choose -------------------------------------------------------------------------------------
def _maximum(*arrays: Any) -> Any:
    return reduce(jnp.maximum, arrays)


_MAXIMUM = define("maximum", number_op(_maximum), dtypes="same", tags=ELEMENTWISE)


def maximum(*ts: Tensor) -> Tensor:
    """Returns the element-wise maximum of all `ts`, which broadcast; ties share the gradient.

    Raises:
        ValueError: there is no tensor.
    """
    if not ts:
        raise ValueError("maximum: at least one tensor is needed")
    return emit(_MAXIMUM, ts)[0]


# ---- fused --------------------------------------------------------------------------------------
def _scaled_add(x: Any, y: Any, a: Any = 1.0, b: Any = 1.0) -> Any:
    check_arithmetic(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        total = _scale(x, a, x.dtype) + _scale(y, b, x.dtype)
    else:
        wide = jnp.promote_types(upcast_half_types(x).dtype, upcast_half_types(y).dtype)
        total = _scale(x, a, wide) + _scale(y, b, wide)
    return total.astype(x.dtype)


def _scale(x: Any, factor: Any, dtype: Any) -> Any:
    if isinstance(factor, float):
        check_range(np.asarray(factor), np.dtype(dtype))
    return x.astype(dtype) * jnp.asarray(factor).astype(dtype)


_SCALED_ADD = define(
    "scaled_add", with_scalars(_scaled_add), tags=ELEMENTWISE, inplace_result="scaled_add__{t}"
)


def scaled_add(X: Tensor, Y: Tensor, a: float | Tensor = 1.0, b: float | Tensor = 1.0) -> Tensor:
    """Returns a * X + b * Y, computed in float32 and rounded to the dtype of `X`.

    Args:
        X, Y: tensors of one shape; the float dtypes may differ.
        a, b: numbers or scalar tensors of any float dtype.
    """
    return emit_with_scalars(_SCALED_ADD, [X, Y], {"a": a, "b": b})[0]


def scaled_add_(X: Tensor, Y: Tensor, a: float | Tensor = 1.0, b: float | Tensor = 1.0) -> Tensor:
    """Updates X to a * X + b * Y in place, like `scaled_add`."""
    return emit_with_scalars(_SCALED_ADD, [X, Y], {"a": a, "b": b}, inplace=0)[0]


def _increment_mod(x: Any, increment: float, modulus: float) -> Any:
    return jnp.mod(x + jnp.asarray(increment, x.dtype), jnp.asarray(modulus, x.dtype))


_INCREMENT_MOD = define(
    "increment_mod",
    number_op(_increment_mod),
    grad=NoGrad("a counter is not differentiated"),
    tags=ELEMENTWISE,
)


def increment_mod(t: Tensor, increment: float, modulus: float) -> Tensor:
    """Returns (t + increment) mod modulus, in the dtype of `t`.

    Raises:
        ValueError: `modulus` is 0.
    """
    return emit(_INCREMENT_MOD, [t], _mod_attrs(t, increment, modulus))[0]


def increment_mod_(t: Tensor, increment: float, modulus: float) -> Tensor:
    """Updates t to (t + increment) mod modulus in place, like `increment_mod`."""
    return emit(_INCREMENT_MOD, [t], _mod_attrs(t, increment, modulus), inplace=0)[0]


def _mod_attrs(t: Tensor, increment: float, modulus: float) -> dict[str, float]:
    if modulus == 0:
        raise ValueError(f"increment_mod: the modulus of {t.id!r} must not be 0")
    return {"increment": increment, "modulus": modulus}
