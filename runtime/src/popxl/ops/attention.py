"""Attention as one op: either with a materialized score matrix, or fused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from popxl._ir.op import Op
from popxl._ir.op_registry import NoGrad, define
from popxl.ops._attention_checks import (
    check_cap,
    check_inputs,
    check_list_arguments,
    window_limits,
)
from popxl.ops._attention_math import (
    AttentionAttrs,
    attention_grads,
    attention_with_weights,
    group_extra_inputs,
)
from popxl.ops._emit import emit
from popxl.ops.reduction import sum_to_like
from popxl.tensor import Tensor

Pair = tuple[Tensor, Tensor]

_MANY = 2**20  # scores of a head, from which they are not held at once


_GRADS = define(
    "attention_grads",
    attention_grads,
    grad=NoGrad("second derivatives of attention are not supported"),
)


def _attention_grad(ctx: Any, op: Op, dy: Tensor, *_: Any) -> list[Tensor | None]:
    q, k, v, *extra = op.inputs
    extra_inputs = group_extra_inputs(extra, AttentionAttrs(**op.attrs))
    kept = [ctx.fwd(t) for t in (q, k, v, *op.outputs, *extra_inputs.seed)]
    attrs = {name: op.attrs[name] for name in ("scale", "p", "cap", "sinks")}
    dq, dk, dv, ds, *d_sinks = emit(_GRADS, [dy, *kept], attrs)
    of_biases = enumerate(extra_inputs.biases, 3)
    grads = [
        *(dq, dk, dv),
        *(sum_to_like(ds, b) if ctx.needs(op, i) else None for i, b in of_biases),
        *(sum_to_like(d, t) for d, t in zip(d_sinks, extra_inputs.sinks, strict=True)),
    ]
    needed = [g if ctx.needs(op, i) else None for i, g in enumerate(grads)]
    return needed + [None] * (len(op.inputs) - len(grads))


def _attention(q: Any, k: Any, v: Any, *extra: Any, **attrs: Any) -> tuple[Any, ...]:
    settings = AttentionAttrs(**attrs)
    check_inputs(q, k, v, group_extra_inputs(extra, settings))
    return attention_with_weights(q, k, v, *extra, settings=settings)


_ATTENTION = define("attention", _attention, grad=_attention_grad)


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
    window: int | tuple[int, int] | None = None,
    cap: float | None = None,
    positions: Pair | None = None,
    segments: Pair | None = None,
    lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    fused: bool | None = None,
) -> Tensor:
    """Returns dropout(softmax(cap(q kᵀ * scale) + biases)) v.

    Products accumulate in float32, and scores and softmax are float32, whatever the dtype of q, k
    and v.

    The score of a hidden key is -inf, so no bias makes it count. A query that sees no key gives 0,
    and gradients of 0.

    Args:
        q: (..., queries, features).
        k, v: (..., keys, features), or with fewer heads, the axis before these: consecutive heads
            of q share one then (grouped queries; Ainslie et al., arXiv:2305.13245).
        biases: float32, each broadcasts to the scores (..., queries, keys).
        scale: of the scores.
        seed_tensor: uint32 (2,), for dropout.
        dropout: probability of a weight to become 0, in [0, 1).
        causal: hide the keys whose position is after the query's.
        window: if causal, hide the keys whose position is so many or more before the query's; at
            least 1, the query's own. Or a pair, causal or not: hide those that are further before,
            and further after the query's.
        cap: positive; scores become cap * tanh(scores / cap).
        positions: if causal or with a window, of queries and keys: int32 (batch or 1, queries) and
            (batch or 1, keys), for q of rank 4. None: 0, 1, ...
        segments: int32 of the same shapes; keys of other segments than the query's are hidden.
        lengths: int32 (batch,), for q of rank 4: the keys from this number on are hidden.
        sinks: floating-point (heads,), of q's heads, the axis before the queries: a further score
            in each row of the softmax, of a key whose value is 0, so that a head may attend to
            nothing.
        fused: never hold all scores. On NVIDIA GPUs it is cuDNN's kernel where that applies (16-bit
            types, no cap, no dropout, no sinks), elsewhere a loop over tiles of the queries. Its
            gradient computes scores again. None: where there are 2**20 scores or more of a head.

    Returns:
        (..., queries, features), of the dtype of v.

    Raises:
        SpecError: shapes or dtypes do not fit, or there is no key.
        TypeError: biases are no list, or positions or segments no pair.
        ValueError: a wrong probability, window or cap, dropout without a seed, or positions of
            attention that does not depend on them.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"attention: the probability of dropout must be in [0, 1), not {dropout}")
    if dropout and seed_tensor is None:
        raise ValueError("attention: dropout needs seed_tensor, uint32 of shape (2,)")
    limits = window_limits(window, causal)
    if not causal and limits is None and positions is not None:
        raise ValueError("attention: positions are of causal attention, or of a window: set causal")
    check_list_arguments(biases, positions=positions, segments=segments)
    check_cap(cap)
    seed = _if_given(seed_tensor) if dropout else []
    settings = AttentionAttrs(
        float(scale), len(biases), float(dropout), bool(causal),
        limits, None if cap is None else float(cap),
        positions is not None, segments is not None, lengths is not None, sinks is not None,
        same_segments=positions is None and segments is not None and segments[0] is segments[1],
    )  # fmt: skip
    inputs = [q, k, v, *biases, *_if_given(sinks)]
    inputs += [*(positions or ()), *(segments or ()), *_if_given(lengths), *seed]
    return _emit(inputs, settings, _has_many_scores(q, k) if fused is None else fused)


def _emit(inputs: list[Tensor], settings: AttentionAttrs, fused: bool) -> Tensor:
    if not fused:
        return emit(_ATTENTION, inputs, settings._asdict())[0]
    from popxl.ops.fused_attention import FUSED_ATTENTION, swap_heads

    return swap_heads(emit(FUSED_ATTENTION, inputs, settings._asdict())[0])


def _has_many_scores(q: Tensor, k: Tensor) -> bool:
    return math.prod(t.shape[-2] for t in (q, k) if t.rank > 1) >= _MANY


def _if_given(t: Tensor | None) -> list[Tensor]:
    return [] if t is None else [t]
