"""Float8 (1.4.3 and 1.5.2): casts with a power-of-two scale, and matmul of float8 tensors.

Gradients go straight through the rounding: they are those of the real-valued function, in the
dtypes of the unquantised tensors.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from popxl import dtypes
from popxl._ir.op_registry import RuntimeCheck, define
from popxl.ops._args import as_hint_attribute
from popxl.ops._emit import emit
from popxl.ops._numerics import check_floating, is_float8
from popxl.ops.elementwise import name_after_dtype
from popxl.ops.linalg import matmul_grads
from popxl.ops.placement import init
from popxl.tensor import Tensor

FLOAT8 = (dtypes.float8_143, dtypes.float8_152)


def scale_by_pow2(x: Any, log2_scale: Any) -> Any:
    """Returns x * 2^log2_scale in float32, for float8 casts."""
    if log2_scale.size != 1 or not jnp.issubdtype(log2_scale.dtype, jnp.integer):
        raise TypeError(
            f"log2_scale must be one integer, not {log2_scale.dtype} of shape {log2_scale.shape}"
        )
    return jnp.ldexp(x.astype(jnp.float32), log2_scale.reshape(()).astype(jnp.int32))


def check_scale(op: str, log2_scale: Tensor) -> None:
    """Raises unless the log2_scale of a float8 op is a scalar int32 tensor.

    Raises:
        TypeError: it is no int32 tensor.
        ValueError: it has not one element.
    """
    if isinstance(log2_scale, Tensor) and log2_scale.nelms != 1:
        raise ValueError(f"{op}: log2_scale must be a scalar, but is {log2_scale!r}")
    if not isinstance(log2_scale, Tensor) or log2_scale.dtype is not dtypes.int32:
        raise TypeError(f"{op}: log2_scale must be an int32 tensor, but is {log2_scale!r}")


def check_float8(op: str, *operands: Tensor) -> None:
    """Raises TypeError unless all operands of an op are float8 tensors."""
    for t in operands:
        if t.dtype not in FLOAT8:
            raise TypeError(f"{op}: operands must be float8, but {t.id!r} is {t.dtype.name}")


# ---- casts --------------------------------------------------------------------------------------
def _to_float8(x: Any, log2_scale: Any, dtype: dtypes.dtype) -> Any:
    check_floating(x)
    return scale_by_pow2(x, log2_scale).astype(dtype.as_jax())


def _scaled_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor | None]:
    """Returns a float8 cast's gradient dx = dy * 2^log2_scale; dy has any float dtype."""
    scale, target = ctx.fwd(op.inputs[1]), op.inputs[0].dtype
    target = dy.dtype if target in FLOAT8 else target
    return [emit(_SCALE, [dy, scale], {"dtype": target})[0], None]


def _is_scale_out_of_range(*inputs: Any, **attrs: Any) -> Any:
    log2_scale = inputs[-1]
    return (log2_scale < -32) | (log2_scale >= 32)


SCALE_CHECK = RuntimeCheck(
    _is_scale_out_of_range, "log2_scale must be in [-32, 32)", "throwIfLog2ScaleTensorNotInRange"
)
_SCALE = define(
    "pow2scale", lambda x, log2_scale, dtype: scale_by_pow2(x, log2_scale).astype(dtype.as_jax())
)
_TO_FLOAT8 = define(
    "pow2scale_cast_to_fp8",
    _to_float8,
    grad=_scaled_grad,
    check=SCALE_CHECK,
    result=name_after_dtype,
)


def pow2scale_cast_to_fp8(t: Tensor, log2_scale: Tensor, data_type: dtypes.dtype) -> Tensor:
    """Rounds t * 2^log2_scale to float8; values out of range become NaN.

    Args:
        t: float16 or float32.
        log2_scale: int32 tensor of one element, in [-32, 32).
        data_type: `popxl.float8_143` or `popxl.float8_152`.

    Raises:
        TypeError: `data_type` is no float8 type.
    """
    if data_type not in FLOAT8:
        raise TypeError(f"pow2scale_cast_to_fp8: {data_type!r} is no float8 dtype")
    check_scale("pow2scale_cast_to_fp8", log2_scale)
    return emit(_TO_FLOAT8, [t, log2_scale], {"dtype": data_type})[0]


def _from_float8(x: Any, log2_scale: Any, dtype: dtypes.dtype) -> Any:
    if not is_float8(x):
        raise TypeError(f"it takes a float8 tensor, not {x.dtype}")
    return scale_by_pow2(x, log2_scale).astype(dtype.as_jax())


_FROM_FLOAT8 = define(
    "pow2scale_cast_from_fp8",
    _from_float8,
    grad=_scaled_grad,
    check=SCALE_CHECK,
    result=name_after_dtype,
)


def pow2scale_cast_from_fp8(t: Tensor, log2_scale: Tensor, data_type: dtypes.dtype) -> Tensor:
    """Returns t * 2^log2_scale as `data_type`; negate the scale to undo a cast to float8.

    Args:
        t: a float8 tensor.
        log2_scale: int32 tensor of one element, in [-32, 32).
        data_type: `popxl.float16`, `popxl.bfloat16` or `popxl.float32`.

    Raises:
        TypeError: `data_type` is no such type.
    """
    if not data_type.is_floating_point or data_type in FLOAT8:
        raise TypeError(f"pow2scale_cast_from_fp8: {data_type!r} must be a float dtype, no float8")
    check_scale("pow2scale_cast_from_fp8", log2_scale)
    return emit(_FROM_FLOAT8, [t, log2_scale], {"dtype": data_type})[0]


# ---- products -----------------------------------------------------------------------------------
def _matmul(
    a: Any, b: Any, log2_scale: Any, available_memory_proportion: float | None = None
) -> Any:
    if not (is_float8(a) and is_float8(b)):
        raise TypeError(f"it takes float8 tensors, not {a.dtype} and {b.dtype}")
    # bfloat16 holds every float8 value, and is what fast units multiply with float32 sums.
    product = jnp.matmul(
        a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    )
    return scale_by_pow2(product, log2_scale).astype(jnp.float16)


def _matmul_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor | None]:
    scaled = emit(_SCALE, [dy, ctx.fwd(op.inputs[2])], {"dtype": dy.dtype})[0]

    def unscaled(t: Tensor) -> Tensor:
        zero = init((), dtypes.int32)
        return pow2scale_cast_from_fp8(ctx.fwd(t), zero, dy.dtype)

    return [*matmul_grads(ctx, op, scaled, unscaled), None]


_MATMUL = define("matmul_pow2scaled", _matmul, grad=_matmul_grad, check=SCALE_CHECK)


def matmul_pow2scaled(
    lhs: Tensor,
    rhs: Tensor,
    log2_scale: Tensor,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """Returns the matrix product of float8 tensors times 2^log2_scale, as float16.

    Args:
        lhs, rhs: float8 tensors, of either kind; numpy's rules for shapes.
        log2_scale: int32 tensor of one element, in [-32, 32).
        available_memory_proportion: a hint for other hardware; recorded, no effect.

    Raises:
        TypeError: an operand is not float8; or, checked last, the scale is not int32.
        ValueError: the scale is no scalar.
    """
    check_float8("matmul_pow2scaled", lhs, rhs)
    check_scale("matmul_pow2scaled", log2_scale)
    return emit(_MATMUL, [lhs, rhs, log2_scale], as_hint_attribute(available_memory_proportion))[0]
