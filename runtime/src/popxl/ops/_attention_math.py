"""Forward and backward arithmetic of attention, for all queries or a tile of them.

Which keys a query sees is said by numbers of its position and its segment, so that no mask of the
size of the scores exists. The softmax is normalised after the second product, on the small result
and not on the scores, and the gradient passes over the scores once: the sum over a row that the
gradient of a softmax needs is the product of the output with its gradient (Dao et al.,
FlashAttention, arXiv:2205.14135, section 3.1 and appendix B).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from popxl.ops._numerics import matmul_operands, matmul_precision
from popxl.ops._reductions import max_over, sum_over
from popxl.ops.placement import materialize_array


def _einsum_float32(equation: str, a: Any, b: Any) -> Any:
    """Batched matrix product (einsum) accumulated and returned in float32."""
    return jnp.einsum(
        equation,
        *matmul_operands(a, b),
        precision=matmul_precision(a, b),
        preferred_element_type=jnp.float32,
    )


_LOWEST = float(np.finfo(np.float32).min)


class AttentionAttrs(NamedTuple):
    """Attributes of the attention ops: mask, scale, dropout, ... (`popxl.ops.attention`).

    Attributes:
        biases: how many there are.
        p: probability of dropout.
        window: how many positions before and after its own a query sees; None: all.
        positions, segments, lengths, sinks: whether they are given.
        same_segments: true if each query has the segment of the key at its place, in order.
    """

    scale: float
    biases: int
    p: float
    causal: bool
    window: tuple[int, int] | None
    cap: float | None
    positions: bool
    segments: bool
    lengths: bool
    sinks: bool = False
    same_segments: bool = False

    @property
    def compares_positions(self) -> bool:
        """True if token positions decide which keys an attention query sees."""
        return self.causal or self.window is not None


class ExtraInputs(NamedTuple):
    """Inputs of attention after q, k and v; the field `floats` holds those with gradients."""

    biases: list[Any]
    sinks: list[Any]
    positions: list[Any]  # of queries and of keys; empty: 0, 1, ...
    segments: list[Any]  # likewise; empty: one segment
    lengths: list[Any]
    seed: list[Any]

    @property
    def floats(self) -> list[Any]:
        return [*self.biases, *self.sinks]


def group_extra_inputs(extra: Sequence[Any], settings: AttentionAttrs) -> ExtraInputs:
    """Groups the attention inputs after q, k and v by kind."""
    remaining = list(extra)

    def take_inputs(n: int) -> list[Any]:
        selected, remaining[:] = remaining[:n], remaining[n:]
        return selected

    counts = (
        settings.biases, int(settings.sinks), 2 * settings.positions, 2 * settings.segments,
        int(settings.lengths),
    )  # fmt: skip
    biases, sinks, positions, segments, lengths = map(take_inputs, counts)
    return ExtraInputs(biases, sinks, positions, segments, lengths, remaining)


def attention_with_weights(
    q: Any, k: Any, v: Any, *extra: Any, settings: AttentionAttrs
) -> tuple[Any, ...]:
    """Computes attention: output, exponentials of scores, 1 / their row sums, then those of sinks.

    A row whose scores are all -inf has exponentials of 0, and so an output and gradients of 0.
    """
    extra_inputs = group_extra_inputs(extra, settings)
    scores = _apply_softcap(_attention_scores(q, k, settings.scale), settings.cap)
    for bias in extra_inputs.biases:
        scores = scores + bias
    visible = visibility_mask(q.shape[-2], k.shape[-2], extra_inputs, settings)
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    largest = jnp.maximum(max_over(scores, -1, keepdims=True), _LOWEST)  # -inf - -inf is NaN
    sinks = [sink.astype(jnp.float32)[:, None, None] for sink in extra_inputs.sinks]
    largest = reduce(jnp.maximum, sinks, largest)
    exponentials = jnp.exp(scores - largest)
    sink_exponentials = [jnp.exp(sink - largest) for sink in sinks]
    total = sum(sink_exponentials, sum_over(exponentials, -1, keepdims=True))
    normaliser = 1 / jnp.maximum(total, 1)  # at least 1, of the largest, unless all are 0
    weights = exponentials.astype(v.dtype)
    dropped_weights = _group_heads(_apply_dropout(weights, extra_inputs.seed, settings.p), v)
    out = (
        _einsum_float32("...qk,...kd->...qd", dropped_weights, v).reshape(
            *q.shape[:-1], v.shape[-1]
        )
        * normaliser
    )
    return out.astype(v.dtype), weights, normaliser, *sink_exponentials


def _group_heads(t: Any, k: Any) -> Any:
    """Reshapes query heads (..., h, q, d) to their key heads (..., g, h / g * q, d).

    Heads that share a head of keys become rows of one matrix, which moves nothing. `t` itself if
    each query head has its own key head.
    """
    if t.shape[:-2] == k.shape[:-2]:
        return t
    return t.reshape(*k.shape[:-2], -1, t.shape[-1])


def _attention_scores(q: Any, k: Any, scale: float) -> Any:
    scores = _einsum_float32("...qd,...kd->...qk", _group_heads(q, k), k)
    scores = scores.reshape(*q.shape[:-1], k.shape[-2])
    return scores if scale == 1 else scores * scale


def _apply_softcap(scores: Any, cap: float | None) -> Any:
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def visibility_mask(
    queries: int, keys: int, extra_inputs: ExtraInputs, settings: AttentionAttrs
) -> Any:
    """Returns the bool mask of keys visible to each query, broadcastable to scores; None: all."""
    conditions = []
    if settings.compares_positions:
        of_queries, of_keys = _broadcast_id_pair(
            extra_inputs.positions or (jnp.arange(queries), jnp.arange(keys))
        )
        before, after = settings.window or (None, None)
        if settings.causal:
            conditions.append(of_keys <= of_queries)
        elif after is not None:
            conditions.append(of_keys - of_queries <= after)
        if before is not None:
            conditions.append(of_queries - of_keys <= before)
    if settings.segments:
        of_queries, of_keys = _broadcast_id_pair(extra_inputs.segments)
        conditions.append(of_queries == of_keys)
    if settings.lengths:
        conditions.append(jnp.arange(keys) < extra_inputs.lengths[0][:, None, None, None])
    return reduce(jnp.logical_and, conditions) if conditions else None


def _broadcast_id_pair(pair: Any) -> tuple[Any, Any]:
    """Reshapes query ids (b, q) and key ids (b, k) to compare them as (b, 1, q, k).

    Without a batch axis, as (q, k).
    """
    queries, keys = pair
    if queries.ndim == 1:
        return queries[:, None], keys[None, :]
    return queries[:, None, :, None], keys[:, None, None, :]


def _apply_dropout(weights: Any, seed: Sequence[Any], p: float) -> Any:
    if not seed:
        return weights
    from popxl.ops.random import dropout_of_array

    return dropout_of_array(weights, seed[0], weights.shape, p)


def attention_grads(
    dy: Any, q: Any, k: Any, v: Any, out: Any, weights: Any, normaliser: Any, *extra_inputs: Any,
    scale: float, p: float, cap: float | None, sinks: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Returns the gradients of q, k, v and the scores, then of sinks if present (float32).

    Args:
        out, weights, normaliser: what `attention_with_weights` gave.
        extra_inputs: the exponentials of sinks, if there are; then the seed.
    """
    sink_exponentials, seed = extra_inputs[: int(sinks)], extra_inputs[int(sinks) :]
    scaled = (dy.astype(jnp.float32) * normaliser).astype(v.dtype)
    rows = sum_over(scaled.astype(jnp.float32) * out, -1, keepdims=True)
    dp = _einsum_float32("...qd,...kd->...qk", _group_heads(scaled, v), v).reshape(weights.shape)
    wide = weights * (_apply_dropout(dp, seed, p) - rows)
    ds = materialize_array(wide.astype(q.dtype))  # read three times
    dv = _transposed_product(
        _group_heads(scaled, v), _group_heads(_apply_dropout(weights, seed, p), v)
    )
    before = ds
    if cap is not None:  # the derivative of cap * tanh(scores / cap)
        slope = 1 - jnp.square(jnp.tanh(_attention_scores(q, k, scale) / cap))
        before = materialize_array((wide * slope).astype(q.dtype))
    before = _group_heads(before, k)
    dk = _transposed_product(_group_heads(q, k), before)
    dq = _einsum_float32("...qk,...kd->...qd", before, k).reshape(q.shape)
    if scale != 1:
        dq, dk = dq * scale, dk * scale
    return (
        dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), ds,
        *(_sinks_grad(rows * share) for share in sink_exponentials),
    )  # fmt: skip


def _sinks_grad(ds: Any) -> Any:
    """Returns the gradient of attention sinks (scores whose value is 0): the sum over each row."""
    heads = ds.ndim - 3
    return -sum_over(ds, (*range(heads), heads + 1, heads + 2))


def _transposed_product(a: Any, scores: Any) -> Any:
    """Returns the product of transposed attention scores with another matrix, (scores)ᵀ a.

    A transposed first operand slows XLA's products down on CPU, so the result is transposed
    instead, which is smaller.
    """
    return materialize_array(_einsum_float32("...qd,...qk->...dk", a, scores)).swapaxes(-1, -2)
