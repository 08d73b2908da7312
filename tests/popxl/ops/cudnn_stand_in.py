"""Attention kernels that stand in for cuDNN's, which run on NVIDIA GPUs alone.

They hide keys as cuDNN's do, and the backward one takes its weights from the statistics of the
forward one. These are relative to the largest score, so that float32 has all of them: cuDNN's lose
digits where all that a query sees is biased down by more than about 2^14.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from popxl.ops import _cudnn_attention
from popxl.ops._cudnn_kernels import KernelMask


def use_stand_in(monkeypatch: pytest.MonkeyPatch, keeps_statistics: bool = True) -> None:
    """Lets attention call these kernels; without statistics, as with another JAX."""
    monkeypatch.setattr(_cudnn_attention, "keeps_statistics", lambda: keeps_statistics)
    monkeypatch.setattr(_cudnn_attention, "run_forward", run_forward)
    monkeypatch.setattr(_cudnn_attention, "run_backward", run_backward)
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention_of_jax)


def run_forward(q: Any, k: Any, v: Any, mask: KernelMask) -> tuple[Any, Any]:
    scores, _, v = _scores(q, k, v, mask)
    weights = jax.nn.softmax(scores, -1)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, v).astype(q.dtype)
    return out, jax.nn.logsumexp(scores - scores.max(-1, keepdims=True), -1)


def run_backward(
    dy: Any, q: Any, k: Any, v: Any, out: Any, statistics: Any, mask: KernelMask
) -> tuple[Any, ...]:
    scores, wide_k, wide_v = _scores(q, k, v, mask)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True) - statistics[..., None])
    wide_dy = dy.astype(jnp.float32)
    rows = jnp.einsum("bqhd,bqhd->bhq", wide_dy, out.astype(jnp.float32))
    d_scores = weights * (jnp.einsum("bqhd,bkhd->bhqk", wide_dy, wide_v) - rows[..., None])
    dq = jnp.einsum("bhqk,bkhd->bqhd", d_scores, wide_k) * mask.scale
    dk = jnp.einsum("bhqk,bqhd->bkhd", d_scores, q.astype(jnp.float32)) * mask.scale
    dv = jnp.einsum("bhqk,bqhd->bkhd", weights, wide_dy)
    dk, dv = (t.reshape(*k.shape[:3], -1, k.shape[3]).sum(3) for t in (dk, dv))
    d_bias = None
    if mask.has_bias_grad:
        axes = [axis for axis, n in enumerate(mask.bias.shape) if n == 1]
        d_bias = d_scores.sum(axes, keepdims=True).astype(mask.bias.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_bias


def attention_of_jax(
    q: Any, k: Any, v: Any, *, bias: Any, scale: float, is_causal: bool,
    key_value_seq_lengths: Any, local_window_size: tuple[int, int] | None, implementation: str,
) -> Any:  # fmt: skip
    """Stands in for `jax.nn.dot_product_attention`."""
    assert implementation == "cudnn"
    window, lengths = local_window_size, key_value_seq_lengths
    return run_forward(q, k, v, KernelMask(scale, bias, False, is_causal, window, lengths))[0]


def _scores(q: Any, k: Any, v: Any, mask: KernelMask) -> tuple[Any, Any, Any]:
    """Returns masked scores (batch, heads, queries, keys), and k and v repeated for their heads."""
    assert mask.bias is None or mask.window is None
    k, v = (jnp.repeat(t, q.shape[2] // k.shape[2], 2).astype(jnp.float32) for t in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q.astype(jnp.float32), k) * mask.scale
    scores = scores if mask.bias is None else scores + mask.bias
    back = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    hidden = (back < 0) & mask.causal
    if mask.window is not None:
        hidden |= back > mask.window[0]
    if mask.lengths is not None:
        hidden = hidden | (jnp.arange(k.shape[1]) >= mask.lengths[:, None, None, None])
    return jnp.where(hidden, jnp.finfo(jnp.float32).min, scores), k, v
