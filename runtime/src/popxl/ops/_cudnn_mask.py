"""The mask of attention as cuDNN's kernel takes it, and what it takes only as a bias."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from popxl.ops._attention_math import (
    AttentionAttrs,
    ExtraInputs,
    group_extra_inputs,
    visibility_mask,
)
from popxl.ops._cudnn_kernels import KernelMask


def _attrs_of_bias_mask(q: Any, k: Any, settings: AttentionAttrs) -> AttentionAttrs:
    """Returns the attributes of that component of the mask that cuDNN must get as a bias.

    The kernel masks the rest itself, which must leave each query a key: a softmax over none is
    NaN. It takes no window beside a bias (cuDNN's frontend refuses that), nor one that is not
    causal.
    """
    seen = 0 if settings.window is None else settings.window[0] + 1
    may_hide_all = settings.lengths or q.shape[-2] - seen >= k.shape[-2]
    adds = settings.segments or settings.biases or may_hide_all
    causal = settings.causal and (settings.positions or (settings.window is not None and adds))
    window = settings.window if causal or not settings.causal else None
    return settings._replace(causal=bool(causal), window=window, lengths=False)


def bias_and_mask(q: Any, k: Any, extra: Sequence[Any], settings: AttentionAttrs) -> list[Any]:
    """Returns the tensors to add to the scores: biases, and a mask from segments and positions."""
    others = group_extra_inputs(extra, settings)
    visible = visibility_mask(q.shape[-2], k.shape[-2], others, _attrs_of_bias_mask(q, k, settings))
    return others.biases if visible is None else [*others.biases, jnp.where(visible, 0.0, -jnp.inf)]


def _finite_bias(bias: Any, dtype: Any) -> Any:
    """Converts a bias to 16 bits, with a finite number lower than all others for -inf."""
    # As cuDNN's own masks: the difference of two such numbers is finite in both 16-bit types.
    hidden = -(2.0**15) if dtype == jnp.float16 else -(2.0**41)
    wide = jnp.where(bias < hidden / 2, hidden / 2, bias)
    finite = jnp.where(bias == -jnp.inf, hidden, wide)
    # Low biases have gradients, too: those of the only keys that a query sees.
    zero = jnp.where(bias == -jnp.inf, 0, bias - lax.stop_gradient(bias))
    return (lax.stop_gradient(finite) + zero).astype(dtype)


class AttentionMask(NamedTuple):
    """The kernel's mask, and (batch, queries, 1, 1): which queries see a key; None: all."""

    kernel: KernelMask
    sees_a_key: Any


def prepare_mask(q: Any, k: Any, extra: Sequence[Any], settings: AttentionAttrs) -> AttentionMask:
    """Returns the mask of q and k, (batch, tokens, heads, features)."""
    others = group_extra_inputs(extra, settings)
    added = bias_and_mask(jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2), extra, settings)
    bias = sum(map(_to_rank_4, added)) if added else None
    sees_a_key = _has_visible_key(bias, q.shape[1], k.shape[1], others, settings)
    if bias is not None:
        shape = (*bias.shape[:2], q.shape[1], k.shape[1])
        bias = jnp.broadcast_to(_finite_bias(bias, q.dtype), shape)
    causal = settings.causal and not settings.positions
    return AttentionMask(
        KernelMask(
            settings.scale,
            bias,
            has_bias_grad=settings.biases > 0,
            causal=causal,
            window=settings.window if causal and bias is None else None,
            lengths=jnp.maximum(others.lengths[0], 1) if others.lengths else None,
        ),
        sees_a_key,
    )


def keep_where(condition: Any, t: Any) -> Any:
    return t if condition is None else jnp.where(condition, t, 0)


def _has_visible_key(
    bias: Any, queries: int, keys: int, other_inputs: ExtraInputs, settings: AttentionAttrs
) -> Any:
    """Returns the mask of queries that see any key, broadcastable to the output; None: all.

    The kernel gives the other queries a mean of values that they must not attend to.
    """
    sees_itself = settings.same_segments and queries == keys
    if not other_inputs.lengths and (bias is None or (sees_itself and not settings.biases)):
        return None
    conditions = [] if bias is None else [bias != -jnp.inf]
    visible = visibility_mask(queries, keys, other_inputs, settings)
    conditions += [] if visible is None else [_to_rank_4(visible)]
    return jnp.swapaxes(reduce(jnp.logical_and, conditions).any(-1, keepdims=True), 1, 2)


def _to_rank_4(t: Any) -> Any:
    return t.reshape((1,) * (4 - t.ndim) + t.shape)
