"""Checks of the attention op's arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from popxl._ir.argument_checks import check_integer
from popxl.ops._numerics import check_floating, check_same_dtype
from popxl.tensor import Tensor

if TYPE_CHECKING:
    from popxl.ops._attention_math import ExtraInputs


def check_list_arguments(biases: Any, **pairs: Any) -> None:
    """Raises TypeError unless `biases` is a list and the other arguments are pairs of tensors."""
    if isinstance(biases, Tensor):
        raise TypeError(f"attention: biases are a list of tensors, not the tensor {biases.id!r}")
    for name, pair in pairs.items():
        if pair is not None and (isinstance(pair, Tensor) or len(pair) != 2):
            raise TypeError(f"attention: {name} are a pair of tensors, of the queries and the keys")


def window_limits(window: Any, causal: bool) -> tuple[int, int] | None:
    """Returns how many positions before and after its own a query sees; None: all.

    Raises:
        TypeError, ValueError: a window is neither a number of 1 or more, of causal attention, nor a
            pair of 0 or more.
    """
    if window is None:
        return None
    if not isinstance(window, tuple):
        check_integer("attention", "window", window, 1)
        if not causal:
            raise ValueError(
                "attention: a window that is a number is of causal attention: set causal, or give "
                "a pair, the positions before and after"
            )
        return int(window) - 1, 0
    if len(window) != 2:
        raise ValueError(f"attention: window is a number or a pair, not {window}")
    for name, limit in zip(("before", "after"), window, strict=True):
        check_integer("attention", f"the window {name} a query", limit, 0)
    before, after = map(int, window)
    return before, 0 if causal else after


def check_cap(cap: float | None) -> None:
    """Raises ValueError for a cap on attention scores that is not positive."""
    if cap is not None and not 0 < cap < math.inf:
        raise ValueError(f"attention: cap must be positive and finite, not {cap}")


def check_inputs(q: Any, k: Any, v: Any, extra_inputs: ExtraInputs) -> None:
    """Raises TypeError or ValueError if dtypes or shapes of attention's inputs do not fit."""
    for t in (q, k, v):
        check_floating(t)
    check_same_dtype(q, k, v)
    shapes = ", ".join(str(t.shape) for t in (q, k, v))
    if (
        min(t.ndim for t in (q, k, v)) < 2
        or not _has_same_heads(q, k)
        or k.shape[:-2] != v.shape[:-2]
    ):
        raise ValueError(
            "q, k and v must have the same leading axes, or q a multiple of their heads, but have "
            f"shapes {shapes}"
        )
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(f"the shapes of q, k and v do not fit: {shapes}")
    if not k.shape[-2]:
        raise ValueError(f"it needs at least one key, but k has shape {k.shape}")
    _check_biases(q, k, extra_inputs.biases)
    for sinks in extra_inputs.sinks:
        check_floating(sinks)
        if q.ndim < 3 or sinks.shape != q.shape[-3:-2]:
            raise ValueError(
                "sinks have a number for each head of q, the axis before the queries, but have "
                f"shape {sinks.shape}, and q {q.shape}"
            )
    _check_id_pair("positions", q, k, extra_inputs.positions)
    _check_id_pair("segments", q, k, extra_inputs.segments)
    for lengths in extra_inputs.lengths:
        _check_int32("lengths", lengths)
        if q.ndim != 4 or lengths.shape != q.shape[:1]:
            raise ValueError(
                "lengths have a number for each sample of q (batch, heads, queries, features), "
                f"but have shape {lengths.shape}, and q {q.shape}"
            )


def _has_same_heads(q: Any, k: Any) -> bool:
    if q.shape[:-2] == k.shape[:-2]:
        return True
    grouped = q.ndim == k.ndim >= 3 and q.shape[:-3] == k.shape[:-3] and k.shape[-3]
    return bool(grouped and q.shape[-3] % k.shape[-3] == 0)


def _check_biases(q: Any, k: Any, biases: Sequence[Any]) -> None:
    scores = (*q.shape[:-1], k.shape[-2])
    for bias in biases:
        if bias.dtype != jnp.float32:
            hides = "; a mask hides keys as a bias of 0 and -inf" if bias.dtype == bool else ""
            raise TypeError(f"biases are float32, not {bias.dtype}: use ops.cast{hides}")
        if jnp.broadcast_shapes(bias.shape, scores) != scores:
            raise ValueError(f"a bias of shape {bias.shape} does not broadcast to {scores}")


def _check_id_pair(name: str, q: Any, k: Any, pair: Sequence[Any]) -> None:
    """Raises unless a (queries, keys) pair of positions or segment ids fits q and k."""
    for of, t, indices in zip(("queries", "keys"), (q, k), pair, strict=False):
        _check_int32(name, indices)
        fits = [(batch, t.shape[-2]) for batch in (1, q.shape[0])]
        if q.ndim != 4 or indices.shape not in fits:
            raise ValueError(
                f"{name} of {of} have shape (batch or 1, {of}), for q of (batch, heads, queries, "
                f"features), but have shape {indices.shape}, and q {q.shape}, k {k.shape}"
            )


def _check_int32(name: str, indices: Any) -> None:
    if indices.dtype != jnp.int32:
        raise TypeError(f"{name} are int32, not {indices.dtype}: use ops.cast")
