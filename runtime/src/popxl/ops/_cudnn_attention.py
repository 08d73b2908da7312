"""Attention by cuDNN's fused kernel, on NVIDIA GPUs.

Its gradient is the same bits each time because it writes the gradient of the scores, in 16 bits,
and multiplies that by the keys. Where that is too much at a time, heads go one group after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from popxl.ops._attention_math import (
    AttentionAttrs,
    ExtraInputs,
    group_extra_inputs,
    visibility_mask,
)
from popxl.ops._kernel_registry import KERNELS, Shapes
from popxl.ops._reductions import traced_capability, traced_platform

MAX_WORKSPACE = 2**32
"""Bytes that the gradient of the scores takes at most, unless one head takes more."""

HALVED, MASKED = "_causal", "_causal_masked"
"""End the names of kernels that leave out the half of the scores that no query sees; and of those
that add a mask of several texts to the rest, which takes as long as another quarter (H200)."""


def is_supported(q: Any, k: Any, v: Any, extra: Sequence[Any], settings: AttentionAttrs) -> bool:
    """True if cuDNN's attention kernel supports these inputs and attributes on the traced platform.

    It has no float32, no caps, no sinks and, since its random numbers are its own, no dropout of
    ours. Its values have as many features as its keys. A bias of each sample and head would be as
    large as the scores.
    """
    shapes = (q.shape[-2], k.shape[-2])
    biases = [
        jnp.broadcast_shapes(b.shape, (1, 1, *shapes))
        for b in _bias_and_mask(q, k, extra, settings)
    ]
    batch, heads = (max((b[axis] for b in biases), default=1) for axis in (0, 1))
    return (
        traced_platform() in ("gpu", "cuda")
        and q.ndim == 4
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= _max_head_dim()
        and v.shape == k.shape
        and (not biases or all(n % 2 == 0 for n in shapes))
        and min(batch, heads) == 1
        and settings.cap is None
        and not settings.sinks
        and not settings.p
    )


def _max_head_dim() -> int:
    """Returns the largest head dimension that cuDNN's kernels support, forward and backward.

    None before Ampere, and 256 on Hopper alone.
    """
    capability = traced_capability()
    if 0 < capability < 8:
        return 0
    return 256 if 9 <= capability < 10 else 128


def kernel_name_suffix(settings: AttentionAttrs) -> str:
    """Returns the suffix of the attention kernel's name for these attributes."""
    if not settings.causal or settings.positions:
        return ""
    return MASKED if settings.segments else HALVED


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


def _bias_and_mask(q: Any, k: Any, extra: Sequence[Any], settings: AttentionAttrs) -> list[Any]:
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


def _attend_head_group(q: Any, k: Any, v: Any, *extra: Any, settings: AttentionAttrs) -> Any:
    """Attention of one group of heads: q, k, v -> (batch, tokens, heads, features)."""
    others = group_extra_inputs(extra, settings)
    added = _bias_and_mask(jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2), extra, settings)
    bias = sum(map(_to_rank_4, added)) if added else None
    sees_a_key = _has_visible_key(bias, q.shape[1], k.shape[1], others, settings)
    if bias is not None:
        shape = (*bias.shape[:2], q.shape[1], k.shape[1])
        bias = jnp.broadcast_to(_finite_bias(bias, q.dtype), shape)
    causal = settings.causal and not settings.positions
    back = settings.window if causal and bias is None else None
    out = jax.nn.dot_product_attention(
        q, k, v,
        bias=bias,
        scale=settings.scale,
        is_causal=causal,
        key_value_seq_lengths=jnp.maximum(others.lengths[0], 1) if others.lengths else None,
        local_window_size=back,
        implementation="cudnn",
    )  # fmt: skip
    return out if sees_a_key is None else jnp.where(sees_a_key, out, 0)


def _has_visible_key(
    bias: Any, queries: int, keys: int, other_inputs: ExtraInputs, settings: AttentionAttrs
) -> Any:
    """Returns the mask of queries that see any key, broadcastable to the output; None: all.

    The kernel gives the other queries a mean of values that they must not attend to.
    """
    if bias is None and not other_inputs.lengths:
        return None
    conditions = [] if bias is None else [bias != -jnp.inf]
    visible = visibility_mask(queries, keys, other_inputs, settings)
    conditions += [] if visible is None else [_to_rank_4(visible)]
    return jnp.swapaxes(reduce(jnp.logical_and, conditions).any(-1, keepdims=True), 1, 2)


def _to_rank_4(t: Any) -> Any:
    return t.reshape((1,) * (4 - t.ndim) + t.shape)


def _workspace_bytes(batch: int, heads: int, queries: int, keys: int) -> int:
    """Returns the bytes of cuDNN's workspace for the gradient of attention scores."""
    return 2 * batch * heads * queries * keys


def _num_head_groups(q: Any, keys: int, key_heads: int) -> int:
    """Returns the number of head groups to compute one by one within the workspace limit.

    A group is whole sets of heads that share keys, or a part of one set.
    """
    batch, heads, queries, _ = q
    shared = heads // key_heads
    for groups in (n for n in range(1, heads + 1) if heads % n == 0):
        size = heads // groups
        if size % shared and shared % size:
            continue
        if _workspace_bytes(batch, size, queries, keys) <= MAX_WORKSPACE:
            return groups
    return heads


def _attend_by_head_groups(q: Any, k: Any, v: Any, *extra: Any, settings: AttentionAttrs) -> Any:
    groups = _num_head_groups(q.shape, k.shape[2], k.shape[1])
    biases, others = extra[: settings.biases], extra[settings.biases :]

    def attend_group(arrays: Any) -> Any:
        return _attend_head_group(*arrays, *others, settings=settings)

    q, k, v = (jnp.swapaxes(t, 1, 2) for t in (q, k, v))
    if groups == 1:
        return jnp.swapaxes(attend_group([q, k, v, *biases]), 1, 2)
    # A loop: the calls in a row ended in an IndexError of XLA's (JAX 0.11.2, CUDA 13.0).
    head_groups = [
        *(_split_head_groups(t, 2, groups) for t in (q, k, v)),
        *(_split_head_groups(b, -3, groups) for b in biases),
    ]
    out = jnp.moveaxis(
        lax.map(attend_group, head_groups), 0, 2
    )  # (batch, queries, groups, heads, features)
    return jnp.swapaxes(out.reshape(*q.shape[:3], v.shape[-1]), 1, 2)


def _split_head_groups(t: Any, axis: int, groups: int) -> Any:
    """Splits the heads (or a bias's heads) into groups: (groups, ...)."""
    heads = t.shape[axis] if t.ndim >= -axis else 1
    if heads == 1:
        return jnp.broadcast_to(t, (groups, *t.shape))
    axis %= t.ndim
    count = min(groups, heads)  # where groups share heads, there are fewer
    head_groups = t.reshape(*t.shape[:axis], count, heads // count, *t.shape[axis + 1 :])
    return jnp.repeat(jnp.moveaxis(head_groups, axis, 0), groups // count, 0)


def attention_kernel(q: Any, k: Any, v: Any, *extra: Any, settings: AttentionAttrs) -> Any:
    # In the form that a gradient asks for: where both are in one program, they are one call.
    biases, fixed = extra[: settings.biases], extra[settings.biases :]
    return jax.vjp(
        lambda *floats: _attend_by_head_groups(*floats, *fixed, settings=settings), q, k, v, *biases
    )[0]


def attention_grads_kernel(
    dy: Any, q: Any, k: Any, v: Any, out: Any, *extra: Any, settings: AttentionAttrs
) -> tuple[Any, ...]:
    biases, fixed = extra[: settings.biases], extra[settings.biases :]
    _, pullback = jax.vjp(
        lambda *floats: _attend_by_head_groups(*floats, *fixed, settings=settings), q, k, v, *biases
    )
    return pullback(dy)


def is_installed() -> bool:
    """True if JAX finds cuDNN."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    return cudnn.cuda_versions is not None


def _forward_flops(shapes: Shapes) -> int:
    """Returns the FLOPs of attention's forward pass: two matrix products."""
    q, _, v = shapes[:3]
    return 2 * math.prod(q[:-1]) * v[-2] * (q[-1] + v[-1])


def _grads_flops(shapes: Shapes) -> int:
    """Returns the FLOPs of attention's backward pass: five matrix products.

    The scores again, and two for each product of the forward pass.
    """
    _, q, _, v = shapes[:4]
    return 2 * math.prod(q[:-1]) * v[-2] * (3 * q[-1] + 2 * v[-1])


FORWARD, BACKWARD = attention_kernel.__name__, attention_grads_kernel.__name__
KERNELS[FORWARD] = _forward_flops
KERNELS[BACKWARD] = _grads_flops
KERNELS[FORWARD + HALVED] = lambda shapes: _forward_flops(shapes) // 2
KERNELS[BACKWARD + HALVED] = lambda shapes: _grads_flops(shapes) // 2
KERNELS[FORWARD + MASKED] = lambda shapes: _forward_flops(shapes) * 3 // 4
KERNELS[BACKWARD + MASKED] = lambda shapes: _grads_flops(shapes) * 3 // 4


def workspace_bytes(name: str, shapes: Shapes) -> int:
    """Returns the workspace bytes of a kernel in `KERNELS`, besides arguments and results."""
    if not name.startswith(BACKWARD):
        return 0
    q, k = shapes[1:3]
    return _workspace_bytes(q[0], q[1] // _num_head_groups(q, k[2], k[1]), q[2], k[2])
