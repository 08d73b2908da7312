"""Planned cost of cuDNN attention, on machines without a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from popxl._ir.op_registry import registry
from popxl.ops import fused_attention
from popxl.ops._attention_math import AttentionAttrs
from popxl.ops._reductions import tracing_platform
from popxl.plan.flat_jaxpr import flatten_jaxpr
from popxl.plan.gpu_kernels import GpuKernels
from popxl.plan.primitives import attention_head_dim_and_direction
from popxl.plan.records import Kernel

ATTRS = AttentionAttrs(1.0, 0, 0.0, True, None, None, False, False, False)._asdict()
FORWARD, GRADS = (registry()[f"fused_attention{end}"].lower for end in ("", "_grads"))
SHAPE, NBYTES = (2, 8, 64, 32), 2 * 8 * 64 * 32 * 2  # samples, heads, tokens, features; bfloat16
FLOPS = 2 * (2 * 2 * 8 * 64 * 64 * 32)  # of two products


def extra_kernels(function: Any, swapped: bool = False) -> list[list[Kernel]]:
    """Kernels besides each of attention's own, in the order of the program."""
    shape = (2, 64, 8, 32) if swapped else SHAPE

    def run(*given: Any) -> Any:
        return function(*(t.swapaxes(1, 2) if swapped else t for t in given))

    with tracing_platform("gpu 9.0"):
        closed = jax.make_jaxpr(run)(*[jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 5)
    flat = flatten_jaxpr(closed.jaxpr)
    kernels = GpuKernels(flat)
    return [
        kernels.kernels_launched_with_attention(node)
        for node in flat.nodes
        if attention_head_dim_and_direction(node)[0]
    ]


def forward(dy: Any, q: Any, k: Any, v: Any, out: Any) -> Any:
    return FORWARD(q, k, v, **ATTRS).swapaxes(1, 2)


def gradients(dy: Any, q: Any, k: Any, v: Any, out: Any) -> list[Any]:
    return [g.swapaxes(1, 2) for g in GRADS(dy, q, k, v, out, **ATTRS)]


def both(dy: Any, q: Any, k: Any, v: Any, out: Any) -> list[Any]:
    return gradients(dy, q, k, v, FORWARD(q, k, v, **ATTRS))


def test_what_has_heads_before_tokens_is_copied():
    copy = Kernel(2 * NBYTES)
    assert extra_kernels(forward, swapped=True) == [[]]
    assert extra_kernels(forward) == [[copy] * 3]
    assert extra_kernels(lambda *given: FORWARD(*given[1:4], **ATTRS), swapped=True) == [[copy]]


def test_a_gradient_runs_the_forward_pass_again_unless_it_is_there():
    again = Kernel(4 * NBYTES, FLOPS // 2, False, 32)  # causal: half of the scores
    assert extra_kernels(gradients, swapped=True) == [[again]]
    assert extra_kernels(both, swapped=True) == [[], []]


def test_where_jax_refuses_the_device_at_hand_a_loop_stands_in(monkeypatch):
    """A plan for an H200 can be made where cuDNN is installed but the GPU is not there."""

    def refuses(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("the head dim must be <= 128")

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal(SHAPE), jnp.bfloat16) for _ in range(3))
    expected = FORWARD(q, k, v, **ATTRS)
    monkeypatch.setattr(fused_attention, "is_installed", lambda: True)
    monkeypatch.setattr(fused_attention, "attention_kernel", refuses)
    with tracing_platform("gpu 9.0"):
        found = FORWARD(q, k, v, **ATTRS)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


def test_a_sum_with_zeros_is_the_other_term():
    def run(x: Any, y: Any) -> Any:
        zeros = jnp.zeros(x.shape, x.dtype)
        return x @ y, zeros + x, jnp.zeros((2, *x.shape), x.dtype) + x

    x = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    flat = flatten_jaxpr(jax.make_jaxpr(run)(x, x).jaxpr)
    assert [node.name for node in flat.nodes if node.name in ("dot_general", "add")] == [
        "dot_general",
        "add",  # of other shapes
    ]
    assert flat.results[1] is flat.inputs[0]
