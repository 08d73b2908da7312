"""Element-wise functions of one tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from popxl import dtypes
from popxl._ir.op_registry import NoGrad, define
from popxl.ops._emit import emit
from popxl.ops._numerics import float_op, number_op
from popxl.ops._tensor_only_ops import ELEMENTWISE, unary_op
from popxl.utils import downcast_np_dtypes

if TYPE_CHECKING:
    from popxl.tensor import Tensor

_STEP = NoGrad("piecewise constant")
_BOOLEAN = NoGrad("boolean output")


# ---- arithmetic ---------------------------------------------------------------------------------
def _abs_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    return [dy * sign(ctx.fwd(op.inputs[0]))]


def _negate_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    return [negate(dy)]


abs = unary_op(
    define("abs", number_op(jnp.abs), grad=_abs_grad, tags=ELEMENTWISE),
    "Absolute value of each element. The gradient at 0 is 0.",
)
negate = unary_op(
    define("negate", number_op(jnp.negative), grad=_negate_grad, tags=ELEMENTWISE),
    "Each element with its sign changed.",
)
sign = unary_op(
    define("sign", number_op(jnp.sign), grad=_STEP, tags=ELEMENTWISE),
    "-1, 0 or 1, the sign of each element. NaN stays NaN.",
)
floor = unary_op(
    define("floor", number_op(jnp.floor), grad=_STEP, tags=ELEMENTWISE),
    "The largest whole number not above each element.",
)
ceil = unary_op(
    define("ceil", number_op(jnp.ceil), grad=_STEP, tags=ELEMENTWISE),
    "The smallest whole number not below each element.",
)


def _clip(x: Any, min: float, max: float) -> Any:
    """Clips by comparisons, so that elements at a bound pass their whole gradient, as in torch."""
    if min != -math.inf:
        low = jnp.asarray(min, x.dtype)
        x = jnp.where(x < low, low, x)
    if max != math.inf:
        high = jnp.asarray(max, x.dtype)
        x = jnp.where(x > high, high, x)
    return x


_CLIP = define("clip", number_op(_clip), tags=ELEMENTWISE)


def clip(t: Tensor, min: float = float("-inf"), max: float = float("inf")) -> Tensor:
    """Clips each element to [min, max].

    Raises:
        ValueError: `min` is above `max`.
    """
    if min > max:
        raise ValueError(f"clip: min={min} is above max={max} for {t.id!r}")
    return emit(_CLIP, [t], {"min": float(min), "max": float(max)})[0]


clamp = clip


# ---- roots, exponentials, trigonometry ----------------------------------------------------------
def _sqrt_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    return [dy * 0.5 / ctx.fwd(op.outputs[0])]


def _exp_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    return [dy * ctx.fwd(op.outputs[0])]


sqrt = unary_op(
    define("sqrt", float_op(jnp.sqrt), grad=_sqrt_grad, tags=ELEMENTWISE),
    "Square root of each element; NaN for negative ones.",
)
_EXP = define("exp", float_op(jnp.exp), grad=_exp_grad, tags=ELEMENTWISE)
exp = unary_op(_EXP, "e to the power of each element.")
exp_ = unary_op(_EXP, "As `exp`, in place.", inplace=0)
log = unary_op(
    define("log", float_op(jnp.log), tags=ELEMENTWISE), "Natural logarithm of each element."
)
log2 = unary_op(
    define("log2", float_op(jnp.log2), tags=ELEMENTWISE),
    "Logarithm to base 2 of each element.",
)
sin = unary_op(
    define("sin", float_op(jnp.sin), tags=ELEMENTWISE), "Sine of each element, in radians."
)
cos = unary_op(
    define("cos", float_op(jnp.cos), tags=ELEMENTWISE), "Cosine of each element, in radians."
)

# ---- tests of values ----------------------------------------------------------------------------
isnan = unary_op(
    define("isnan", jnp.isnan, grad=_BOOLEAN, tags=ELEMENTWISE),
    "Whether each element is NaN, as bool.",
)
isinf = unary_op(
    define("isinf", jnp.isinf, grad=_BOOLEAN, tags=ELEMENTWISE),
    "Whether each element is +inf or -inf, as bool.",
)
isfinite = unary_op(
    define("isfinite", jnp.isfinite, grad=_BOOLEAN, tags=ELEMENTWISE),
    "Whether each element is neither infinite nor NaN, as bool.",
)


# ---- the same value -----------------------------------------------------------------------------
def _cast_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor | None]:
    source = op.inputs[0].dtype
    return [cast(dy, source) if source.is_floating_point else None]


def name_after_dtype(op: Any) -> list[str]:
    """Returns the name of a cast's output, which is its dtype (the name rule of casts)."""
    return ["{t}_" + op.attrs["dtype"].name]


_CAST = define(
    "cast",
    lambda x, dtype: x.astype(dtype.as_jax()),
    grad=_cast_grad,
    tags=ELEMENTWISE,
    result=name_after_dtype,
)


def cast(t: Tensor, data_type: dtypes.dtype) -> Tensor:
    """Converts a tensor to another dtype.

    Floats round to nearest-even; towards zero when the target is an integer type.

    Raises:
        TypeError: from or to PopXL's float8, for which there are `pow2scale_cast_from_fp8` and
            `pow2scale_cast_to_fp8`, or to another one, for which there is `fp8.cast`.
        ValueError: `data_type` is no dtype, or one of 64 bits, which devices do not have.
    """
    data_type = dtypes.dtype.as_dtype(data_type)
    if data_type.as_numpy() in downcast_np_dtypes:
        raise ValueError(f"cast: devices have no elements of 64 bits, such as {data_type.name}")
    for given in (t.dtype, data_type):
        if given in (dtypes.float8_143, dtypes.float8_152):
            raise TypeError(
                f"cast: {t.id!r} from {t.dtype.name} to {data_type.name}: use "
                "pow2scale_cast_to_fp8 or pow2scale_cast_from_fp8 for float8"
            )
    if data_type in (dtypes.float8_e4m3fn, dtypes.float8_e5m2):
        raise TypeError(
            f"cast: {t.id!r} to {data_type.name}: use fp8.cast, which does not overflow"
        )
    return emit(_CAST, [t], {"dtype": data_type})[0]


_IDENTITY = define("identity", lambda x: x, grad=lambda ctx, op, dy: [dy], tags=ELEMENTWISE)


def identity(t: Tensor, output_name: str | None = None) -> Tensor:
    """Returns the same value as a new tensor.

    Args:
        output_name: name of the new tensor.
    """
    return emit(_IDENTITY, [t], names=[output_name] if output_name else ())[0]


rename = identity

_DETACH = define(
    "detach",
    lax.stop_gradient,
    grad=NoGrad("detached"),
    view_write=lambda inputs, value: (value,),
    tags=ELEMENTWISE,
)


def detach(t: Tensor) -> Tensor:
    """Returns the same value as a tensor through which no gradient flows."""
    return emit(_DETACH, [t])[0]


def detach_(t: Tensor) -> Tensor:
    """Detaches a tensor like `detach`, as a view."""
    return emit(_DETACH, [t], view=True)[0]
