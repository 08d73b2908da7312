"""Functions of one tensor, element by element."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from popxl import dtypes, ops
from popxl._core.op import emit
from popxl._core.opdef import NoGrad, define
from popxl.ops._numerics import floats, numbers

if TYPE_CHECKING:
    from popxl.tensor import Tensor
from popxl.utils import downcast_np_dtypes

_TAGS = ("elementwise",)
_STEP = NoGrad("piecewise constant")
_BOOLEAN = NoGrad("boolean output")


# ---- arithmetic ---------------------------------------------------------------------------------
def _abs_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    return [ops.mul(dy, ops.sign(ctx.fwd(op.inputs[0])))]


_ABS = define("abs", numbers(jnp.abs), grad=_abs_grad, tags=_TAGS)


def abs(t: Tensor) -> Tensor:
    """Absolute value of each element. The gradient at 0 is 0."""
    return emit(_ABS, [t])[0]


def _negate_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    return [ops.negate(dy)]


_NEGATE = define("negate", numbers(jnp.negative), grad=_negate_grad, tags=_TAGS)


def negate(t: Tensor) -> Tensor:
    """Each element with its sign changed."""
    return emit(_NEGATE, [t])[0]


_SIGN = define("sign", numbers(jnp.sign), grad=_STEP, tags=_TAGS)


def sign(t: Tensor) -> Tensor:
    """-1, 0 or 1, the sign of each element. NaN stays NaN."""
    return emit(_SIGN, [t])[0]


_FLOOR = define("floor", numbers(jnp.floor), grad=_STEP, tags=_TAGS)


def floor(t: Tensor) -> Tensor:
    """The largest whole number not above each element."""
    return emit(_FLOOR, [t])[0]


_CEIL = define("ceil", numbers(jnp.ceil), grad=_STEP, tags=_TAGS)


def ceil(t: Tensor) -> Tensor:
    """The smallest whole number not below each element."""
    return emit(_CEIL, [t])[0]


def _clip(x: Any, min: float, max: float) -> Any:
    low = None if min == -math.inf else jnp.asarray(min, x.dtype)
    high = None if max == math.inf else jnp.asarray(max, x.dtype)
    return jnp.clip(x, low, high)


_CLIP = define("clip", numbers(_clip), tags=_TAGS)


def clip(t: Tensor, min: float = float("-inf"), max: float = float("inf")) -> Tensor:
    """Each element, or the nearer bound if it lies outside [min, max].

    Raises:
        ValueError: `min` is above `max`.
    """
    if min > max:
        raise ValueError(f"clip: min={min} is above max={max} for {t.id!r}")
    return emit(_CLIP, [t], {"min": float(min), "max": float(max)})[0]


clamp = clip


# ---- roots, exponentials, trigonometry ----------------------------------------------------------
def _sqrt_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    return [ops.div(dy * 0.5, ctx.fwd(op.outputs[0]))]


_SQRT = define("sqrt", floats(jnp.sqrt), grad=_sqrt_grad, tags=_TAGS)


def sqrt(t: Tensor) -> Tensor:
    """Square root of each element; NaN for negative ones."""
    return emit(_SQRT, [t])[0]


def _exp_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    return [ops.mul(dy, ctx.fwd(op.outputs[0]))]


_EXP = define("exp", floats(jnp.exp), grad=_exp_grad, tags=_TAGS)


def exp(t: Tensor) -> Tensor:
    """e to the power of each element."""
    return emit(_EXP, [t])[0]


def exp_(t: Tensor) -> Tensor:
    """As `exp`, in place."""
    return emit(_EXP, [t], inplace=0)[0]


_LOG = define("log", floats(jnp.log), tags=_TAGS)


def log(t: Tensor) -> Tensor:
    """Natural logarithm of each element."""
    return emit(_LOG, [t])[0]


_LOG2 = define("log2", floats(jnp.log2), tags=_TAGS)


def log2(t: Tensor) -> Tensor:
    """Logarithm to base 2 of each element."""
    return emit(_LOG2, [t])[0]


_SIN = define("sin", floats(jnp.sin), tags=_TAGS)


def sin(t: Tensor) -> Tensor:
    """Sine of each element, in radians."""
    return emit(_SIN, [t])[0]


_COS = define("cos", floats(jnp.cos), tags=_TAGS)


def cos(t: Tensor) -> Tensor:
    """Cosine of each element, in radians."""
    return emit(_COS, [t])[0]


# ---- tests of values ----------------------------------------------------------------------------
_ISNAN = define("isnan", jnp.isnan, grad=_BOOLEAN, tags=_TAGS)


def isnan(t: Tensor) -> Tensor:
    """Whether each element is NaN, as bool."""
    return emit(_ISNAN, [t])[0]


_ISINF = define("isinf", jnp.isinf, grad=_BOOLEAN, tags=_TAGS)


def isinf(t: Tensor) -> Tensor:
    """Whether each element is +inf or -inf, as bool."""
    return emit(_ISINF, [t])[0]


_ISFINITE = define("isfinite", jnp.isfinite, grad=_BOOLEAN, tags=_TAGS)


def isfinite(t: Tensor) -> Tensor:
    """Whether each element is neither infinite nor NaN, as bool."""
    return emit(_ISFINITE, [t])[0]


# ---- the same value -----------------------------------------------------------------------------
def _cast_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor | None]:
    source = op.inputs[0].dtype
    return [ops.cast(dy, source) if source.is_floating_point else None]


_CAST = define(
    "cast",
    lambda x, dtype: x.astype(dtype.as_jax()),
    grad=_cast_grad,
    tags=_TAGS,
)


def cast(t: Tensor, data_type: dtypes.dtype) -> Tensor:
    """Convert to another dtype.

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


def _same_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    return [dy]


_IDENTITY = define("identity", lambda x: x, grad=_same_grad, tags=_TAGS)


def identity(t: Tensor, output_name: str | None = None) -> Tensor:
    """The same value as a new tensor.

    Args:
        output_name: name of the new tensor.
    """
    return emit(_IDENTITY, [t], names=[output_name])[0]


rename = identity

_DETACH = define(
    "detach",
    lax.stop_gradient,
    grad=NoGrad("detached"),
    view_write=lambda inputs, value: (value,),
    tags=_TAGS,
)


def detach(t: Tensor) -> Tensor:
    """The same value, through which no gradient flows."""
    return emit(_DETACH, [t])[0]


def detach_(t: Tensor) -> Tensor:
    """As `detach`, as a view of `t`."""
    return emit(_DETACH, [t], view=True)[0]
