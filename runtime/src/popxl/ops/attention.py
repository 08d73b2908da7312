"""Attention of queries to keys, as one op.

Which keys a query sees is said by numbers of its positions and segments, so that no mask of the
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

from popxl import ops
from popxl._core.op import Op, emit
from popxl._core.opdef import NoGrad, define
from popxl.ops._folds import max_over, sum_over
from popxl.ops._grads import sum_to
from popxl.ops._numerics import check_floating, check_same_dtype
from popxl.ops.placement import materialised
from popxl.ops.random import dropped
from popxl.tensor import Tensor


def _product(equation: str, a: Any, b: Any) -> Any:
    """Accumulated, and returned, in float32."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


HIDDEN = -1e9
"""Score of a key that a query does not see: its weight is 0."""

Pair = tuple[Tensor, Tensor]


class _Settings(NamedTuple):
    """What is known of a use of the op: its attributes."""

    scale: float
    biases: int
    p: float
    causal: bool
    window: int | None
    cap: float | None
    positions: bool
    segments: bool


def _attention(q: Any, k: Any, v: Any, *rest: Any, **attrs: Any) -> tuple[Any, ...]:
    """(output, exponentials of the scores, 1 / their sums)."""
    settings = _Settings(**attrs)
    for t in (q, k, v):
        check_floating(t)
    check_same_dtype(q, k, v)
    biases, pairs, seed = _sorted(rest, settings)
    _check_shapes(q, k, v, biases)
    scores = _capped(_scores(q, k, settings.scale), settings.cap)
    for bias in biases:
        scores = scores + bias
    visible = _visible(q.shape[-2], k.shape[-2], pairs, settings)
    if visible is not None:
        scores = jnp.where(visible, scores, HIDDEN)
    exponentials = jnp.exp(scores - max_over(scores, -1, keepdims=True))
    normaliser = 1 / sum_over(exponentials, -1, keepdims=True)
    weights = exponentials.astype(v.dtype)
    kept = _grouped(_kept(weights, seed, settings.p), v)
    out = _product("...qk,...kd->...qd", kept, v).reshape(*q.shape[:-1], v.shape[-1]) * normaliser
    return out.astype(v.dtype), weights, normaliser


def _sorted(rest: Sequence[Any], settings: _Settings) -> tuple[list[Any], list[Any], list[Any]]:
    """The inputs after q, k and v: biases; positions and segments, a pair each; the seed."""
    end = settings.biases + 2 * (settings.positions + settings.segments)
    return (
        list(rest[: settings.biases]),
        [rest[i : i + 2] for i in range(settings.biases, end, 2)],
        list(rest[end:]),
    )


def _grouped(t: Any, k: Any) -> Any:
    """The query heads that share a head of keys as rows of one matrix: (..., h, q, d) -> (..., g,
    h / g * q, d), which moves nothing. `t` itself if each has its own."""
    if t.shape[:-2] == k.shape[:-2]:
        return t
    return t.reshape(*k.shape[:-2], -1, t.shape[-1])


def _scores(q: Any, k: Any, scale: float) -> Any:
    scores = _product("...qd,...kd->...qk", _grouped(q, k), k)
    scores = scores.reshape(*q.shape[:-1], k.shape[-2])
    return scores if scale == 1 else scores * scale


def _capped(scores: Any, cap: float | None) -> Any:
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def _visible(queries: int, keys: int, pairs: list[Any], settings: _Settings) -> Any:
    """Which keys each query sees: bool, broadcasts to the scores; None: all."""
    conditions = []
    if settings.causal:
        places = jnp.arange(queries), jnp.arange(keys)
        of_queries, of_keys = _facing(pairs[0] if settings.positions else places)
        conditions.append(of_keys <= of_queries)
        if settings.window is not None:
            conditions.append(of_queries - of_keys < settings.window)
    if settings.segments:
        of_queries, of_keys = _facing(pairs[-1])
        conditions.append(of_queries == of_keys)
    return reduce(jnp.logical_and, conditions) if conditions else None


def _facing(pair: Any) -> tuple[Any, Any]:
    """Numbers of queries (b, q) and keys (b, k), to be compared as (b, 1, q, k); without batches,
    as (q, k)."""
    queries, keys = pair
    if queries.ndim == 1:
        return queries[:, None], keys[None, :]
    return queries[:, None, :, None], keys[:, None, None, :]


def _check_shapes(q: Any, k: Any, v: Any, biases: Sequence[Any]) -> None:
    shapes = ", ".join(str(t.shape) for t in (q, k, v))
    if min(t.ndim for t in (q, k, v)) < 2 or not _same_heads(q, k) or k.shape[:-2] != v.shape[:-2]:
        raise ValueError(
            "q, k and v must have the same leading axes, or q a multiple of their heads, but have "
            f"shapes {shapes}"
        )
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(f"the shapes of q, k and v do not fit: {shapes}")
    scores = (*q.shape[:-1], k.shape[-2])
    for bias in biases:
        if jnp.broadcast_shapes(bias.shape, scores) != scores:
            raise ValueError(f"a bias of shape {bias.shape} does not broadcast to {scores}")


def _same_heads(q: Any, k: Any) -> bool:
    if q.shape[:-2] == k.shape[:-2]:
        return True
    alike = q.ndim == k.ndim >= 3 and q.shape[:-3] == k.shape[:-3]
    return bool(alike and q.shape[-3] % k.shape[-3] == 0)


def _kept(weights: Any, seed: Sequence[Any], p: float) -> Any:
    return dropped(weights, seed[0], weights.shape, p) if seed else weights


def _attention_grads(
    dy: Any, q: Any, k: Any, v: Any, out: Any, weights: Any, normaliser: Any, *seed: Any,
    scale: float, p: float, cap: float | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of q, k, v and of the scores."""
    scaled = (dy.astype(jnp.float32) * normaliser).astype(v.dtype)
    rows = sum_over(scaled.astype(jnp.float32) * out, -1, keepdims=True)
    dp = _product("...qd,...kd->...qk", _grouped(scaled, v), v).reshape(weights.shape)
    wide = weights * (_kept(dp, seed, p) - rows)
    ds = materialised(wide.astype(q.dtype))  # read three times
    dv = _transposed_product(_grouped(scaled, v), _grouped(_kept(weights, seed, p), v))
    before = ds
    if cap is not None:  # the derivative of cap * tanh(scores / cap)
        slope = 1 - jnp.square(jnp.tanh(_scores(q, k, scale) / cap))
        before = materialised((wide * slope).astype(q.dtype))
    before = _grouped(before, k)
    dk = _transposed_product(_grouped(q, k), before)
    dq = _product("...qk,...kd->...qd", before, k).reshape(q.shape)
    if scale != 1:
        dq, dk = dq * scale, dk * scale
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), ds


def _transposed_product(a: Any, scores: Any) -> Any:
    """(scores)ᵀ a. A transposed first operand slows XLA's products down on CPU, so the result is
    transposed instead, which is smaller."""
    return materialised(_product("...qd,...qk->...dk", a, scores)).swapaxes(-1, -2)


def _flops(op: Op) -> int:
    q, _, v = op.inputs[:3]
    scores = op.outputs[1].nelms
    return 2 * scores * (q.shape[-1] + v.shape[-1])


def _grads_flops(op: Op) -> int:
    _, q, _, v = op.inputs[:4]
    return 4 * op.outputs[3].nelms * (q.shape[-1] + v.shape[-1])


_GRADS = define(
    "attention_grads",
    _attention_grads,
    grad=NoGrad("second derivatives of attention are not supported"),
    flops=_grads_flops,
)


def _attention_grad(ctx: Any, op: Op, dy: Tensor, *_: Any) -> list[Tensor | None]:
    q, k, v, *rest = op.inputs
    biases, pairs, seed = _sorted(rest, _Settings(**op.attrs))
    kept = [ctx.fwd(t) for t in (q, k, v, *op.outputs, *seed)]
    attrs = {name: op.attrs[name] for name in ("scale", "p", "cap")}
    *found, ds = emit(_GRADS, [dy, *kept], attrs)
    return [
        *(g if ctx.needs(op, i) else None for i, g in enumerate(found)),
        *(_of_bias(ds, b) if ctx.needs(op, 3 + i) else None for i, b in enumerate(biases)),
        *(None for _ in (*pairs, *pairs, *seed)),
    ]


def _of_bias(ds: Tensor, bias: Tensor) -> Tensor:
    wide = ds if ds.dtype is bias.dtype else ops.cast(ds, bias.dtype)
    return sum_to(wide, bias.shape)


_ATTENTION = define("attention", _attention, grad=_attention_grad, flops=_flops)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    biases: Sequence[Tensor] = (),
    scale: float = 1.0,
    seed_tensor: Tensor | None = None,
    dropout: float = 0.0,
    *,
    causal: bool = False,
    window: int | None = None,
    cap: float | None = None,
    positions: Pair | None = None,
    segments: Pair | None = None,
) -> Tensor:
    """dropout(softmax(cap(q kᵀ * scale) + biases)) v. Products accumulate in float32, and scores
    and softmax are float32, whatever the dtype of q, k and v.

    Args:
        q: (..., queries, features).
        k, v: (..., keys, features), or with fewer heads, the axis before these: consecutive heads
            of q share one then (grouped queries; Ainslie et al., arXiv:2305.13245).
        biases: float32, each broadcasts to the scores (..., queries, keys).
        scale: of the scores.
        seed_tensor: uint32 (2,), for dropout.
        dropout: probability of a weight to become 0, in [0, 1).
        causal: hide the keys whose position is after the query's.
        window: if causal, hide the keys whose position is so many or more before the query's.
        cap: scores become cap * tanh(scores / cap).
        positions: if causal, of queries and keys: int32 (batch or 1, queries) and (batch or 1,
            keys), for q of rank 4. None: 0, 1, ...
        segments: numbers of the same shapes; keys of other segments than the query's are hidden.

    Returns:
        (..., queries, features), of the dtype of v.

    Raises:
        SpecError: shapes or dtypes do not fit.
        ValueError: a wrong probability, dropout without a seed, or window or positions of attention
            that is not causal.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"attention: the probability of dropout must be in [0, 1), not {dropout}")
    if dropout and seed_tensor is None:
        raise ValueError("attention: dropout needs seed_tensor, uint32 of shape (2,)")
    if not causal and (window is not None or positions is not None):
        raise ValueError("attention: window and positions are of causal attention: set causal")
    seed = [seed_tensor] if dropout and seed_tensor is not None else []
    settings = _Settings(
        float(scale), len(biases), float(dropout), bool(causal),
        None if window is None else int(window), None if cap is None else float(cap),
        positions is not None, segments is not None,
    )  # fmt: skip
    inputs = [q, k, v, *biases, *(positions or ()), *(segments or ()), *seed]
    return emit(_ATTENTION, inputs, settings._asdict())[0]
