"""Element-wise comparisons, Boolean functions and selection, with numpy broadcasting."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from popxl._ir.op_registry import NoGrad, define
from popxl.ops._emit import emit
from popxl.ops._grads import scalar_like
from popxl.ops._numerics import check_same_dtype
from popxl.ops._tensor_only_ops import ELEMENTWISE, binary_op, unary_op
from popxl.ops.reduction import sum_to
from popxl.tensor import Tensor

_BOOLEAN = NoGrad("boolean output")
_TRUE = "Numbers are true unless they are 0."

equal = binary_op(
    define("equal", jnp.equal, grad=_BOOLEAN, dtypes="same", tags=ELEMENTWISE),
    "Whether lhs == rhs, as bool. Shapes broadcast; the dtypes must be equal.",
)
_GREATER = define("greater", jnp.greater, grad=_BOOLEAN, dtypes="same", tags=ELEMENTWISE)


def greater(input: Tensor, other: Tensor) -> Tensor:
    """Returns input > other, element-wise, as bool; shapes broadcast, the dtypes must be equal."""
    return emit(_GREATER, [input, other])[0]


logical_and = binary_op(
    define("logical_and", jnp.logical_and, grad=_BOOLEAN, tags=ELEMENTWISE, result="and_out"),
    f"Whether both are true, as bool. {_TRUE} Shapes broadcast.",
)
logical_or = binary_op(
    define("logical_or", jnp.logical_or, grad=_BOOLEAN, tags=ELEMENTWISE, result="or_out"),
    f"Whether either is true, as bool. {_TRUE} Shapes broadcast.",
)
logical_not = unary_op(
    define("logical_not", jnp.logical_not, grad=_BOOLEAN, tags=ELEMENTWISE, result="not_out"),
    f"Whether each element is false, as bool. {_TRUE}",
)


def _where(condition: Any, lhs: Any, rhs: Any) -> Any:
    check_same_dtype(lhs, rhs)
    return jnp.where(condition.astype(bool), lhs, rhs)


def _where_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor | None]:
    condition, lhs, rhs = op.inputs
    mask, zero = ctx.fwd(condition), scalar_like(0, dy)
    return [
        None,
        sum_to(where(mask, dy, zero), lhs.shape) if ctx.needs(op, 1) else None,
        sum_to(where(mask, zero, dy), rhs.shape) if ctx.needs(op, 2) else None,
    ]


_WHERE = define("where", _where, grad=_where_grad, tags=ELEMENTWISE)


def where(condition: Tensor, lhs: Tensor, rhs: Tensor) -> Tensor:
    """Returns elements of `lhs` where `condition` is true (not 0), else of `rhs`.

    The shapes broadcast; `lhs` and `rhs` must have one dtype.
    """
    return emit(_WHERE, [condition, lhs, rhs])[0]
