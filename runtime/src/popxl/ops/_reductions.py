"""Reductions over axes, reshaped to forms that XLA computes fast.

On CPU, XLA cuts a reduction of more than 32 elements into a tree, for accuracy. The first level of
the tree cannot be fused with what computes the elements: it writes them all out, and then reads
them one by one. Folding the elements first, as rows of which up to 16 are reduced into one, is a
short reduction over an outer axis, which XLA fuses and vectorises; the tree then has little left to
do. The order of additions stays a tree's, so that long sums are as accurate as without folding.

Leading axes that are summed together become one axis first. The tree's windows over several axes
are added element by element, ten times as slowly as windows over one.

Other platforms have reductions of their own, which folding would only hide from their compilers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_ROWS, _SHORTEST = 16, 32  # most rows that are folded, and the fewest elements a row may have

_target: ContextVar[tuple[str | None, float]] = ContextVar("target", default=(None, 0.0))


@contextmanager
def tracing_platform(target: str) -> Iterator[None]:
    """Context that sets the platform programs are traced for; a GPU with capability: "gpu 9.0"."""
    platform, _, capability = target.partition(" ")
    token = _target.set((platform, float(capability or 0)))
    try:
        yield
    finally:
        _target.reset(token)


def traced_platform() -> str | None:
    """Returns the platform of the program being traced; None outside `tracing_platform`."""
    return _target.get()[0]


def traced_capability() -> float:
    """Returns the compute capability of the traced NVIDIA GPU; 0: unknown."""
    return _target.get()[1]


def sum_over(x: Any, axes: int | tuple[int, ...], keepdims: bool = False) -> Any:
    """Returns `jnp.sum(x)` over axes, reshaped so that XLA reduces it fast."""
    return _reduce(jnp.sum, x, axes, keepdims)


def mean_over(x: Any, axes: int | tuple[int, ...], keepdims: bool = False) -> Any:
    """Returns `jnp.mean(x)` over axes (floats), reshaped so that XLA reduces it fast."""
    total = sum_over(x, axes, keepdims)
    return total / (x.size / max(total.size, 1))


def max_over(x: Any, axes: int | tuple[int, ...], keepdims: bool = False) -> Any:
    """Returns `jnp.max(x)` over axes, reshaped so that XLA reduces it fast."""
    return _differentiated_whole(jnp.max, x, axes, keepdims)


def _reduce(reduce: Callable[..., Any], x: Any, axes: int | tuple[int, ...], keepdims: bool) -> Any:
    axes = tuple(sorted(a % x.ndim for a in ((axes,) if isinstance(axes, int) else axes)))
    inner, outer = len(axes), x.ndim - len(axes)
    if traced_platform() != "cpu":
        return reduce(x, axes, keepdims=keepdims)
    if inner > 1 and outer and axes == tuple(range(inner)):
        out = _reduce_flattened(reduce, x, inner)
    elif axes == tuple(range(outer, x.ndim)):
        out = _reduce_by_rows(reduce, x, outer)
    else:
        return reduce(x, axes, keepdims=keepdims)
    kept = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
    return out.reshape(kept) if keepdims else out


def _reduce_flattened(reduce: Callable[..., Any], x: Any, inner: int) -> Any:
    """Reduces the first `inner` axes of an array, flattened into one axis."""
    if math.prod(x.shape[:inner]) <= _SHORTEST:  # no tree
        return reduce(x, tuple(range(inner)))
    # Without the barrier, XLA reduces the axes one by one again.
    return reduce(lax.optimization_barrier(x.reshape(-1, *x.shape[inner:])), 0)


def _reduce_by_rows(reduce: Callable[..., Any], x: Any, outer: int) -> Any:
    """Reduces all axes of an array but the first `outer`, by rows and then over the rows."""
    rows = _num_fold_rows(x.size // max(math.prod(x.shape[:outer]), 1))
    if rows == 1:
        return reduce(x, tuple(range(outer, x.ndim)))
    folded = reduce(x.reshape(*x.shape[:outer], rows, -1), outer)
    # Without the barrier, XLA merges the two reductions back into one.
    return reduce(lax.optimization_barrier(folded), -1)


_differentiated_whole = jax.custom_vjp(_reduce, nondiff_argnums=(0, 2, 3))
"""`_reduce` with the gradient of one reduction: two maxima one after the other would not share it
equally among equal elements."""


def _reduce_with_residual(
    reduce: Callable[..., Any], x: Any, axes: int | tuple[int, ...], keepdims: bool
) -> tuple[Any, Any]:
    return _reduce(reduce, x, axes, keepdims), x


def _reduction_gradient(
    reduce: Callable[..., Any], axes: int | tuple[int, ...], keepdims: bool, x: Any, dy: Any
) -> Any:
    return jax.vjp(lambda t: reduce(t, axes, keepdims=keepdims), x)[1](dy)


_differentiated_whole.defvjp(_reduce_with_residual, _reduction_gradient)


def _num_fold_rows(elements: int) -> int:
    """Returns the number of rows in which elements are reduced first; 1: all at once."""
    rows = min(_ROWS, elements // _SHORTEST)
    while rows > 1 and elements % rows:
        rows //= 2
    return max(rows, 1)
