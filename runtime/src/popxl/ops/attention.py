"""Attention of queries to keys, as one op.

The softmax is normalised after the second product, on the small result and not on the scores, and
the gradient passes over the scores once: the sum over a row that the gradient of a softmax needs is
the product of the output with its gradient (Dao et al., FlashAttention, arXiv:2205.14135, section
3.1 and appendix B).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def _attention(
    q: Any, k: Any, v: Any, *rest: Any, scale: float, biases: int, p: float
) -> tuple[Any, ...]:
    """(output, exponentials of the scores, 1 / their sums)."""
    for t in (q, k, v):
        check_floating(t)
    check_same_dtype(q, k, v)
    _check_shapes(q, k, v, rest[:biases])
    scores = _product("...qd,...kd->...qk", q, k)
    if scale != 1:
        scores = scores * scale
    for bias in rest[:biases]:
        scores = scores + bias
    exponentials = jnp.exp(scores - max_over(scores, -1, keepdims=True))
    normaliser = 1 / sum_over(exponentials, -1, keepdims=True)
    weights = exponentials.astype(v.dtype)
    out = _product("...qk,...kd->...qd", _kept(weights, rest[biases:], p), v) * normaliser
    return out.astype(v.dtype), weights, normaliser


def _check_shapes(q: Any, k: Any, v: Any, biases: Sequence[Any]) -> None:
    shapes = ", ".join(str(t.shape) for t in (q, k, v))
    if min(t.ndim for t in (q, k, v)) < 2 or len({t.shape[:-2] for t in (q, k, v)}) > 1:
        raise ValueError(f"q, k and v must have the same leading axes, but have shapes {shapes}")
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(f"the shapes of q, k and v do not fit: {shapes}")
    scores = (*q.shape[:-1], k.shape[-2])
    for bias in biases:
        if jnp.broadcast_shapes(bias.shape, scores) != scores:
            raise ValueError(f"a bias of shape {bias.shape} does not broadcast to {scores}")


def _kept(weights: Any, seed: Sequence[Any], p: float) -> Any:
    return dropped(weights, seed[0], weights.shape, p) if seed else weights


def _attention_grads(
    dy: Any, q: Any, k: Any, v: Any, out: Any, weights: Any, normaliser: Any, *seed: Any,
    scale: float, p: float,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of q, k, v and of the scores."""
    scaled = (dy.astype(jnp.float32) * normaliser).astype(v.dtype)
    rows = sum_over(scaled.astype(jnp.float32) * out, -1, keepdims=True)
    dp = _product("...qd,...kd->...qk", scaled, v)
    wide = weights * (_kept(dp, seed, p) - rows)
    ds = materialised(wide.astype(q.dtype))  # read three times
    dv = _transposed_product(scaled, _kept(weights, seed, p))
    dk = _transposed_product(q, ds)
    dq = _product("...qk,...kd->...qd", ds, k)
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
    q, k, v = op.inputs[:3]
    biases = op.inputs[3 : 3 + op.attrs["biases"]]
    seed = op.inputs[3 + len(biases) :]
    kept = [ctx.fwd(t) for t in (q, k, v, *op.outputs, *seed)]
    attrs = {"scale": op.attrs["scale"], "p": op.attrs["p"]}
    *found, ds = emit(_GRADS, [dy, *kept], attrs)
    return [
        *(g if ctx.needs(op, i) else None for i, g in enumerate(found)),
        *(_of_bias(ds, b) if ctx.needs(op, 3 + i) else None for i, b in enumerate(biases)),
        *(None for _ in seed),
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
) -> Tensor:
    """dropout(softmax(q kᵀ * scale + biases)) v. Products accumulate in float32, and scores and
    softmax are float32, whatever the dtype of q, k and v.

    Args:
        q: (..., queries, features).
        k, v: (..., keys, features).
        biases: float32, each broadcasts to the scores (..., queries, keys).
        scale: of the scores.
        seed_tensor: uint32 (2,), for dropout.
        dropout: probability of a weight to become 0, in [0, 1).

    Returns:
        (..., queries, features), of the dtype of v.

    Raises:
        SpecError: shapes or dtypes do not fit.
        ValueError: a wrong probability, or dropout without a seed.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"attention: the probability of dropout must be in [0, 1), not {dropout}")
    if dropout and seed_tensor is None:
        raise ValueError("attention: dropout needs seed_tensor, uint32 of shape (2,)")
    seed = [seed_tensor] if dropout and seed_tensor is not None else []
    attrs = {"scale": float(scale), "biases": len(biases), "p": float(dropout)}
    return emit(_ATTENTION, [q, k, v, *biases, *seed], attrs)[0]
