"""Accumulators: gradient sums and running moments, updated in place.

All of them compute in float32 and round once to the accumulator's dtype, to nearest or at random
(see `popxl_addons.enable_stochastic_rounding`), so `X` may have another dtype; where all is
integer, they compute in integers. Factors are numbers or scalar tensors. Each returns the updated
tensor, an alias of `t`.
"""

# ruff: noqa: N803 - names of PopXL's arguments
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from popxl._ir.op_registry import define
from popxl.ops._args import normalize_axis
from popxl.ops._index_bounds import check_constant_indices, indices_or_size
from popxl.ops._scalars import emit_with_scalars, with_scalars
from popxl.ops._scatter_add import scatter_add
from popxl.ops.gathering import check_indices
from popxl.ops.var_updates._store import NO_GRAD, round_to_variable, update_operands
from popxl.tensor import Tensor

_UPDATE: dict[str, Any] = {"grad": NO_GRAD, "rounds": True}
_OF_EACH: dict[str, Any] = {**_UPDATE, "tags": ("elementwise",)}


def _define_update(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the lowering of an update whose new value is `formula(t, x, f)`; f can be None."""

    @with_scalars
    def lower(t: Any, x: Any, f: Any = None, rounding: Any = None) -> Any:
        return round_to_variable(formula(*update_operands(t, x, f)), t, rounding)

    return lower


# ---- sums ---------------------------------------------------------------------------------------
_ACCUMULATE = define(
    "accumulate",
    _define_update(lambda t, x, f: t + (x if f is None else f * x)),
    result="accumulate__{t}",
    **_OF_EACH | {"tags": ("elementwise", "sum")},
)


def accumulate_(t: Tensor, X: Tensor, f: float | Tensor | None = None) -> Tensor:
    """Updates t += X, or t += f * X, in place; `X` can have another dtype than `t`."""
    return emit_with_scalars(_ACCUMULATE, [t, X], {"f": f}, inplace=0)[0]


_SQUARE = define(
    "accumulate_square",
    _define_update(lambda t, x, f: t + f * jnp.square(x)),
    result="accumulate_square__{t}",
    **_OF_EACH,
)


def accumulate_square_(t: Tensor, X: Tensor, f: float | Tensor = 1.0) -> Tensor:
    """Updates t += f * X² in place."""
    return emit_with_scalars(_SQUARE, [t, X], {"f": f}, inplace=0)[0]


@with_scalars
def _accumulate_mean(t: Any, x: Any, step: Any, rounding: Any = None) -> Any:
    count = jnp.asarray(step).astype(jnp.float32)
    value, term, _ = update_operands(t, x, count)
    return round_to_variable((value * count + term) / (count + 1), t, rounding)


_MEAN = define("accumulate_mean", _accumulate_mean, result="accumulate_mean__{t}", **_OF_EACH)


def accumulate_mean_(t: Tensor, X: Tensor, step: float | Tensor) -> Tensor:
    """Updates the running mean of `step` values, `t`, by one more value `X`, in place.

    Args:
        step: how many values `t` is the mean of; 0 overwrites `t`.
    """
    return emit_with_scalars(_MEAN, [t, X], {"step": step}, inplace=0)[0]


_MAXIMUM = define(
    "accumulate_maximum",
    _define_update(lambda t, x, f: jnp.maximum(t, x)),
    result="accumulate_maximum__{t}",
    **_OF_EACH,
)


def accumulate_maximum_(t: Tensor, X: Tensor) -> Tensor:
    """Updates `t` to the element-wise maximum of `t` and X, in place; NaN if either is."""
    return emit_with_scalars(_MAXIMUM, [t, X], {}, inplace=0)[0]


# ---- moving averages ----------------------------------------------------------------------------
_MOVING_AVERAGE = define(
    "accumulate_moving_average",
    _define_update(lambda t, x, f: f * t + (1 - f) * x),
    result="accumulate_moving_avg__{t}",
    **_OF_EACH,
)


def accumulate_moving_average_(t: Tensor, X: Tensor, f: float | Tensor) -> Tensor:
    """Updates the moving average t = f * t + (1 - f) * X in place."""
    return emit_with_scalars(_MOVING_AVERAGE, [t, X], {"f": f}, inplace=0)[0]


_MOVING_AVERAGE_SQUARE = define(
    "accumulate_moving_average_square",
    _define_update(lambda t, x, f: f * t + (1 - f) * jnp.square(x)),
    result="accumulate_moving_avg_square__{t}",
    **_OF_EACH,
)


def accumulate_moving_average_square_(t: Tensor, X: Tensor, f: float | Tensor) -> Tensor:
    """Updates the moving average t = f * t + (1 - f) * X² in place."""
    return emit_with_scalars(_MOVING_AVERAGE_SQUARE, [t, X], {"f": f}, inplace=0)[0]


# ---- scale and zero -----------------------------------------------------------------------------
@with_scalars
def _scale(t: Any, f: Any, rounding: Any = None) -> Any:
    value, factor = update_operands(t, f)
    # A factor of 0 clears the accumulator, also of infinities and NaNs.
    return round_to_variable(
        jnp.where(factor == 0, jnp.zeros((), factor.dtype), value * factor), t, rounding
    )


_SCALE = define("accumulator_scale", _scale, result="accumulator_scale__{t}", **_OF_EACH)


def accumulator_scale_(t: Tensor, f: float | Tensor) -> Tensor:
    """Updates t *= f in place; a factor of 0 sets `t` to 0, NaN and infinity included."""
    return emit_with_scalars(_SCALE, [t], {"f": f}, inplace=0)[0]


def accumulator_zero_(t: Tensor) -> Tensor:
    """Sets `t` to 0 in place, NaN and infinity included."""
    return accumulator_scale_(t, 0.0)


# ---- rows ---------------------------------------------------------------------------------------
@with_scalars
def _sparse_accumulate(
    t: Any, x: Any, indices: Any, axis: int, f: Any = None, rounding: Any = None
) -> Any:
    if x.ndim != t.ndim:
        raise ValueError(f"X of shape {x.shape} must have the rank of the tensor {t.shape}")
    if x.shape[axis] != indices.size:
        raise ValueError(f"X has {x.shape[axis]} slices along axis {axis}, but there are "
                         f"{indices.size} indices")  # fmt: skip
    value, term, factor = update_operands(t, x, f)
    rows = jnp.moveaxis(term if factor is None else term * factor, axis, 0)
    where = indices_or_size(indices, t.shape[axis]).reshape(-1)
    total = scatter_add(jnp.moveaxis(value, axis, 0), where, rows)
    return round_to_variable(jnp.moveaxis(total, 0, axis), t, rounding)


_SPARSE_ACCUMULATE = define(
    "sparse_accumulate", _sparse_accumulate, result="sparse_accumulate__{t}", **_UPDATE
)


def sparse_accumulate_(
    t: Tensor,
    X: Tensor,
    indices: Tensor,
    axis: int = 0,
    f: float | Tensor | None = None,
    W: Tensor | None = None,
) -> Tensor:
    """Updates t[indices[i]] += f * X[i] along `axis` in place (a gather's gradient).

    Args:
        t: an accumulator.
        X: as `t`, but with one slice for each index along `axis`.
        indices: integers; the same one may come several times, one out of range is left out.
        W: the gathered variable, which gives `t` its layout on IPUs; no effect.

    Raises:
        ValueError: `t` has no such axis, or the indices are not integers.
        IndexError: a constant has an index out of range.
    """
    op = "sparse_accumulate"
    check_indices(op, indices)
    axis = normalize_axis(op, t, axis)
    check_constant_indices(op, indices, t.shape[axis])
    inputs, factor = [t, X, indices], {"f": f}
    return emit_with_scalars(_SPARSE_ACCUMULATE, inputs, factor, {"axis": axis}, inplace=0)[0]
