"""Reductions over axes, and cumulative sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp

from popxl._ir.op_registry import NoGrad, OpDef, define
from popxl.ops._args import Axes, normalize_axes, normalize_axis
from popxl.ops._emit import emit
from popxl.ops._grads import divide_by_count
from popxl.ops._numerics import (
    check_arithmetic,
    check_not_empty,
    check_number,
    float_op,
    upcast_half_types,
)
from popxl.ops._reductions import max_over, mean_over, sum_over
from popxl.ops._tensor_only_ops import publish_op_function, unary_op
from popxl.ops.elementwise import cast
from popxl.ops.shape import reshape

if TYPE_CHECKING:
    from popxl.tensor import Tensor


def _reduction_lowering(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a reduction's lowering `fn(x, axes, keepdims)`: half types computed in float32."""

    def lower(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
        check_number(x)
        return fn(upcast_half_types(x), axes, keepdims).astype(x.dtype)

    return lower


def _selection_lowering(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the lowering `fn(x, axes, keepdims)` of an op that selects an element, as max."""

    def lower(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
        check_arithmetic(x)
        check_not_empty(x, axes)
        return fn(x, axes, keepdims)

    return lower


class Reduction(Protocol):
    """Op function that reduces one, several or all (None) axes of a tensor."""

    def __call__(self, t: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor: ...


def _reduction_function(defn: OpDef, doc: str) -> Reduction:
    """Returns a function that adds a reduction op, with docstring `doc`."""

    def op(t: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
        attrs = {"axes": normalize_axes(defn.name, t, axis), "keepdims": bool(keepdims)}
        return emit(defn, [t], attrs)[0]

    return publish_op_function(defn, op, doc)


# ---- broadcasting, which is a sum backwards -----------------------------------------------------
def _broadcast_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    return [sum_to(dy, op.inputs[0].shape)]


_BROADCAST_TO = define(
    "broadcast_to",
    lambda x, shape: jnp.broadcast_to(x, shape),
    grad=_broadcast_grad,
    tags=("movement",),
)


def broadcast_to(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Broadcasts `t` to `shape` by numpy's rules; `t` itself if it has that shape."""
    if t.shape == tuple(shape):
        return t
    return emit(_BROADCAST_TO, [t], {"shape": tuple(shape)})[0]


def sum_to(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """Sums a gradient over the axes along which a tensor of `shape` was broadcast."""
    shape = tuple(shape)
    if grad.shape == shape:
        return grad
    extra = grad.rank - len(shape)
    axes = list(range(extra))
    axes += [extra + i for i, n in enumerate(shape) if n == 1 and grad.shape[extra + i] != 1]
    total = sum(grad, axes, keepdims=False) if axes else grad
    return total if total.shape == shape else reshape(total, shape)


def sum_to_like(grad: Tensor, t: Tensor) -> Tensor:
    """Sums a gradient like `sum_to`, to the shape and dtype of `t`."""
    return sum_to(grad if grad.dtype is t.dtype else cast(grad, t.dtype), t.shape)


# ---- sums ---------------------------------------------------------------------------------------
def _broadcast_reduced_grad(op: Any, dy: Tensor) -> Tensor:
    """Repeats the gradient of a reduced tensor along the axes that were reduced."""
    x = op.inputs[0]
    kept = tuple(1 if i in op.attrs["axes"] else n for i, n in enumerate(x.shape))
    return broadcast_to(dy if dy.shape == kept else reshape(dy, kept), x.shape)


def _sum_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    return [_broadcast_reduced_grad(op, dy)]


sum = _reduction_function(
    define("sum", _reduction_lowering(sum_over), grad=_sum_grad, tags=("reduction",)),
    """Sum over `axis`: an axis, several, or all (None). Half types accumulate in float32.

    Args:
        keepdims: keep the axes, with size 1.

    Raises:
        ValueError: `t` has no such axis.
    """,
)


def _mean_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor]:
    count = math.prod(op.inputs[0].shape[i] for i in op.attrs["axes"])
    return [_broadcast_reduced_grad(op, divide_by_count(dy, count))]


mean = _reduction_function(
    define("mean", float_op(mean_over), grad=_mean_grad, tags=("reduction",)),
    "Mean over `axis`, as `sum`.",
)
sumsquare = _reduction_function(
    define(
        "sumsquare",
        _reduction_lowering(lambda x, axes, keepdims: sum_over(x * x, axes, keepdims)),
        tags=("reduction",),
    ),
    "Sum of squares over `axis`, as `sum`.",
)


def _lamb_square(x: Any) -> Any:
    check_number(x)
    wide = upcast_half_types(x)
    return sum_over(wide * wide, tuple(range(wide.ndim)))


lamb_square = unary_op(
    define("lamb_square", _lamb_square),
    "Sum of the squares of all elements as a float32 scalar, for the trust ratio of LAMB.",
)


def _l1(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    # The sign, not abs's derivative of 1, so that the gradient at 0 is 0.
    return jnp.sum(x * jax.lax.stop_gradient(jnp.sign(x)), axes, keepdims=keepdims)


l1 = _reduction_function(
    define("l1", _reduction_lowering(_l1)),
    "Sum of absolute values over `axis`, as `sum`. The gradient at 0 is 0.",
)


def _l2(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    return jnp.sqrt(jnp.sum(x * x, axes, keepdims=keepdims))


l2 = _reduction_function(
    define("l2", _reduction_lowering(_l2)), "Euclidean norm over `axis`, as `sum`."
)
logsum = _reduction_function(
    define(
        "logsum",
        float_op(lambda x, axes, keepdims: jnp.log(jnp.sum(x, axes, keepdims=keepdims))),
    ),
    "Logarithm of the sum over `axis`, as `sum`.",
)


def _logsumexp(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    check_not_empty(x, axes)
    return jax.nn.logsumexp(x, axes, keepdims=keepdims)


logsumexp = _reduction_function(
    define(
        "logsumexp",
        float_op(_logsumexp),
    ),
    "log(sum(exp(t))) over `axis`, without overflow, as `sum`.",
)
prod = _reduction_function(
    define(
        "prod", _reduction_lowering(lambda x, axes, keepdims: jnp.prod(x, axes, keepdims=keepdims))
    ),
    "Product over `axis`, as `sum`.",
)


# ---- extremes -----------------------------------------------------------------------------------
max = _reduction_function(
    define(
        "max",
        _selection_lowering(max_over),
        tags=("reduction",),
    ),
    "Largest element over `axis`, as `sum`. Equal largest elements share the gradient.",
)
min = _reduction_function(
    define(
        "min",
        _selection_lowering(lambda x, axes, keepdims: jnp.min(x, axes, keepdims=keepdims)),
        tags=("reduction",),
    ),
    "Smallest element over `axis`, as `sum`. Equal smallest elements share the gradient.",
)


def _median(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    count = len(axes)
    rows = jnp.moveaxis(x, axes, range(x.ndim - count, x.ndim))
    rows = rows.reshape((*rows.shape[: x.ndim - count], -1))
    middle = jnp.sort(rows, -1)[..., (rows.shape[-1] - 1) // 2]
    return jnp.expand_dims(middle, axes) if keepdims else middle


median = _reduction_function(
    define("median", _selection_lowering(_median)),
    "Median over `axis`, as `sum`; the lower of the two middle elements of an even number.",
)


def _arg_reduction_lowering(fn: Callable[..., Any]) -> Callable[..., Any]:
    def lower(x: Any, axis: int | None, keepdims: bool) -> Any:
        check_arithmetic(x)
        check_not_empty(x, range(x.ndim) if axis is None else axis)
        return fn(x, axis, keepdims=keepdims).astype(jnp.int32)

    return lower


_ARGMAX = define("argmax", _arg_reduction_lowering(jnp.argmax), grad=NoGrad("integer output"))
_ARGMIN = define("argmin", _arg_reduction_lowering(jnp.argmin), grad=NoGrad("integer output"))


def argmax(t: Tensor, dim: int | None = 0, keepdim: bool | None = False) -> Tensor:
    """Returns the index of the largest element along `dim`, as int32; ties: the first.

    Args:
        dim: the axis; None: the index into the flattened tensor.
        keepdim: keep the axis, with size 1.
    """
    return emit(_ARGMAX, [t], _arg_attrs("argmax", t, dim, keepdim))[0]


def argmin(t: Tensor, dim: int | None = 0, keepdim: bool | None = False) -> Tensor:
    """Returns the index of the smallest element along `dim`, as int32; ties: the first."""
    return emit(_ARGMIN, [t], _arg_attrs("argmin", t, dim, keepdim))[0]


def _arg_attrs(op: str, t: Tensor, dim: int | None, keepdim: bool | None) -> dict[str, Any]:
    return {"axis": None if dim is None else normalize_axis(op, t, dim), "keepdims": bool(keepdim)}


# ---- running sums -------------------------------------------------------------------------------
def _cumsum(x: Any, axis: int) -> Any:
    check_number(x)
    return jnp.cumsum(upcast_half_types(x), axis).astype(x.dtype)


_CUMSUM = define("cumsum", _cumsum)


def cumsum(t: Tensor, dim: int | None = 0) -> Tensor:
    """Returns the inclusive cumulative sum along axis `dim`."""
    return emit(_CUMSUM, [t], {"axis": normalize_axis("cumsum", t, dim or 0)})[0]
