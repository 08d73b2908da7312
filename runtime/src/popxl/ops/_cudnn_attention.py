"""Attention by cuDNN's fused kernel, on NVIDIA GPUs.

Its gradient is the same bits each time because it writes the gradient of the scores, in 16 bits,
and multiplies that by the keys. Where that is too much at a time, heads go one group after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from popxl.ops._attention_math import AttentionAttrs
from popxl.ops._cudnn_kernels import (
    keeps_statistics,
    run_backward,
    run_forward,
    run_forward_of_jax,
)
from popxl.ops._cudnn_mask import AttentionMask, bias_and_mask, keep_where, prepare_mask
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
        jnp.broadcast_shapes(b.shape, (1, 1, *shapes)) for b in bias_and_mask(q, k, extra, settings)
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


class _HeadGroups:
    """Attention of heads in groups, one after another, each within the limit of the workspace.

    Args:
        inputs: q, k, v, biases and the other inputs of attention.
    """

    def __init__(self, inputs: Sequence[Any], settings: AttentionAttrs) -> None:
        count = 3 + settings.biases
        self._floats, self._others, self._settings = inputs[:count], inputs[count:], settings
        q, k = inputs[:2]
        self.count = _num_head_groups(q.shape, k.shape[2], k.shape[1])

    def forward(self) -> tuple[Any, Any]:
        """Returns the output, (batch, queries, heads, features), and the statistics."""
        if self.count == 1:
            return self._attend(*self._split(*self._floats))
        # A loop: the calls in a row ended in an IndexError of XLA's (JAX 0.11.2, CUDA 13.0).
        groups = self._split(*self._floats)
        out, statistics = lax.map(lambda group: self._attend(*group), groups)
        return _join_head_groups(out, 2), _join_head_groups(statistics, 1)

    def backward(self, dy: Any, out: Any, statistics: Any) -> tuple[Any, ...]:
        """Returns the gradients of q, k, v and each bias."""
        if not keeps_statistics():
            return tuple(jax.vjp(lambda *floats: self._output(*floats), *self._floats)[1](dy))
        groups, join = jax.vjp(self._split, *self._floats)
        if self.count == 1:
            return tuple(join(self._grads(dy, out, statistics, *groups)))
        split = (
            _split_head_groups(dy, 2, self.count),
            _split_head_groups(out, 2, self.count),
            _split_head_groups(statistics, 1, self.count),
        )
        return tuple(join(lax.map(lambda group: self._grads(*group), (*split, *groups))))

    def _output(self, *floats: Any) -> Any:
        return _HeadGroups([*floats, *self._others], self._settings).forward()[0]

    def _split(self, *floats: Any) -> tuple[Any, ...]:
        """Splits q, k, v and biases into groups; tokens come before heads in their q, k, v."""
        qkv = [jnp.swapaxes(t, 1, 2) for t in floats[:3]]
        if self.count == 1:
            return *qkv, *floats[3:]
        return (
            *(_split_head_groups(t, 2, self.count) for t in qkv),
            *(_split_head_groups(b, -3, self.count) for b in floats[3:]),
        )

    def _attend(self, q: Any, k: Any, v: Any, *biases: Any) -> tuple[Any, Any]:
        mask = prepare_mask(q, k, [*biases, *self._others], self._settings)
        if keeps_statistics():
            out, statistics = run_forward(q, k, v, mask.kernel)
        else:
            out = run_forward_of_jax(q, k, v, mask.kernel)
            statistics = jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
        return keep_where(mask.sees_a_key, out), statistics

    def _grads(
        self, dy: Any, out: Any, statistics: Any, q: Any, k: Any, v: Any, *biases: Any
    ) -> tuple[Any, ...]:
        def mask(*biases: Any) -> AttentionMask:
            return prepare_mask(q, k, [*biases, *self._others], self._settings)

        kernel, sees_a_key = mask(*biases)
        dy = keep_where(sees_a_key, dy)
        *grads, d_bias = run_backward(dy, q, k, v, out, statistics, kernel)
        if not biases:
            return tuple(grads)
        return *grads, *jax.vjp(lambda *given: mask(*given).kernel.bias, *biases)[1](d_bias)


def _join_head_groups(t: Any, axis: int) -> Any:
    """Joins groups (groups, ...) along the heads' axis of the result."""
    t = jnp.moveaxis(t, 0, axis)
    return t.reshape(*t.shape[:axis], -1, *t.shape[axis + 2 :])


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
    """Returns the output, (batch, queries, heads, features), and statistics for its gradient."""
    return _HeadGroups([q, k, v, *extra], settings).forward()


def attention_grads_kernel(
    dy: Any, q: Any, k: Any, v: Any, out: Any, statistics: Any, *extra: Any,
    settings: AttentionAttrs,
) -> tuple[Any, ...]:  # fmt: skip
    """Returns the gradients of q, k, v and each bias; `dy` and `out` are (b, queries, h, d)."""
    return _HeadGroups([q, k, v, *extra], settings).backward(dy, out, statistics)


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
