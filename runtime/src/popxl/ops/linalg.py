"""Matrix multiplication."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from popxl import context, dtypes
from popxl._ir.op import Op
from popxl._ir.op_registry import define
from popxl.ops._emit import emit
from popxl.ops._numerics import (
    accumulation_dtype,
    check_number,
    matmul_operands,
    matmul_precision,
)
from popxl.ops.elementwise import cast
from popxl.ops.reduction import sum_to
from popxl.ops.shape import reshape, transpose
from popxl.tensor import Tensor


def _matmul(
    a: Any,
    b: Any,
    output_type: dtypes.dtype | None = None,
    partials_type: dtypes.dtype | None = None,
    available_memory_proportion: float | None = None,
) -> Any:
    check_number(a)
    dtype = a.dtype if output_type is None else output_type.as_jax()
    result = jnp.matmul(
        *matmul_operands(a, b),
        precision=matmul_precision(a, b),
        preferred_element_type=accumulation_dtype(a.dtype, dtype),
    )
    return result.astype(dtype)


def _matmul_grad(ctx: Any, op: Op, dy: Tensor) -> list[Tensor | None]:
    dc = dy if dy.dtype is op.inputs[0].dtype else cast(dy, op.inputs[0].dtype)
    return matmul_grads(ctx, op, dc, ctx.fwd)


def matmul_grads(
    ctx: Any, op: Op, dy: Tensor, value: Callable[[Tensor], Tensor]
) -> list[Tensor | None]:
    """Returns dA = dC Bᵀ and dB = Aᵀ dC; vectors count as matrices of one row or column.

    Args:
        value: an operand in the gradient graph, in the dtype of `dy`.
    """
    a, b = op.inputs[:2]
    a_shape = a.shape if a.rank > 1 else (1, *a.shape)
    b_shape = b.shape if b.rank > 1 else (*b.shape, 1)
    batch = jnp.broadcast_shapes(a_shape[:-2], b_shape[:-2])
    dc = _reshape_to(dy, (*batch, a_shape[-2], b_shape[-1]))
    da = db = None
    if ctx.needs(op, 0):
        product = matmul(dc, _swap_last_axes(_reshape_to(value(b), b_shape)))
        da = _reshape_to(sum_to(product, a_shape), a.shape)
    if ctx.needs(op, 1):
        x = _reshape_to(value(a), a_shape)
        if len(b_shape) == 2:  # one contraction over batch and rows, not a sum of products
            x, dc = (_reshape_to(t, (math.prod(t.shape[:-1]), t.shape[-1])) for t in (x, dc))
        db = _reshape_to(sum_to(matmul(_swap_last_axes(x), dc), b_shape), b.shape)
    return [da, db]


def _reshape_to(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    return t if t.shape == tuple(shape) else reshape(t, shape)


def _swap_last_axes(t: Tensor) -> Tensor:
    return transpose(t, (*range(t.rank - 2), t.rank - 1, t.rank - 2))


_MATMUL = define("matmul", _matmul, grad=_matmul_grad, dtypes="same")


_PARTIALS = {"": None, "half": dtypes.float16, "float": dtypes.float32}


def _partials_option() -> dtypes.dtype | None:
    """Returns the accumulation dtype that the session options set for all matmuls."""
    option = context.get_ir()._pb_ir.getSessionOptions().partialsTypeMatMuls
    if str(option).lower() not in _PARTIALS:
        raise ValueError(
            f"the session option partialsTypeMatMuls is {option!r}: set it to 'half', 'float' or ''"
        )
    return _PARTIALS[str(option).lower()]


def matmul(
    lhs: Tensor,
    rhs: Tensor,
    available_memory_proportion: float | None = None,
    output_type: dtypes.dtype | None = None,
    partials_type: dtypes.dtype | None = None,
) -> Tensor:
    """Returns the matrix product by numpy's rules: batch axes broadcast, vectors are allowed.

    Args:
        lhs, rhs: tensors of one dtype. Half types accumulate in float32.
        available_memory_proportion: a hint for other hardware; recorded, no effect.
        output_type: dtype of the result; default: that of the inputs.
        partials_type: dtype of the accumulation to ask for; default: that of the session option
            `partialsTypeMatMuls`. Recorded, float32 is used.

    Raises:
        ValueError: the option is neither "half" nor "float" nor empty.
        SpecError: the shapes do not fit, or the dtypes differ.
    """
    if partials_type is None:
        partials_type = _partials_option()
    attrs = {
        "output_type": output_type,
        "partials_type": partials_type,
        "available_memory_proportion": available_memory_proportion,
    }
    return emit(_MATMUL, [lhs, rhs], {k: v for k, v in attrs.items() if v is not None})[0]
