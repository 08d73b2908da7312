"""Planned kernels of a GPU, on machines without one."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from popxl._ir.op_registry import registry
from popxl.ops import (
    _computed_apart,
    _cudnn_attention,
    _cudnn_kernels,
    activation,
    fused_attention,
    normalisation,
)
from popxl.ops._attention_math import AttentionAttrs
from popxl.ops._reductions import tracing_platform
from popxl.plan.common_subexpressions import merge_equal_nodes
from popxl.plan.flat_jaxpr import flatten_jaxpr
from popxl.plan.gpu_kernels import GpuKernels
from popxl.plan.memory_estimate import LivenessModel
from popxl.plan.primitives import attention_head_dim_and_direction, nbytes
from popxl.plan.records import Kernel
from popxl.plan.segment_cost import CostCounter

ATTRS = AttentionAttrs(1.0, 0, 0.0, True, None, None, False, False, False)._asdict()
FORWARD, GRADS = (registry()[f"fused_attention{end}"].lower for end in ("", "_grads"))
SHAPE, NBYTES = (2, 8, 64, 32), 2 * 8 * 64 * 32 * 2  # samples, heads, tokens, features; bfloat16
OUT = (2, 64, 8, 32)


def extra_kernels(function: Any, swapped: bool = False) -> list[list[Kernel]]:
    """Kernels besides each of attention's own, in the order of the program."""

    def run(dy: Any, *given: Any) -> Any:
        q, k, v = (t.swapaxes(1, 2) if swapped else t for t in given[:3])
        return function(dy, q, k, v, *given[3:])

    specs = [jax.ShapeDtypeStruct(OUT if swapped else SHAPE, jnp.bfloat16)] * 3
    out = jax.ShapeDtypeStruct(OUT, jnp.bfloat16)
    with tracing_platform("gpu 9.0"):
        closed = jax.make_jaxpr(run)(out, *specs, out, jax.ShapeDtypeStruct((2, 8, 64), "float32"))
    flat = flatten_jaxpr(closed.jaxpr)
    kernels = GpuKernels(flat)
    return [
        kernels.kernels_launched_with_attention(node)
        for node in flat.nodes
        if attention_head_dim_and_direction(node)[0]
    ]


def forward(dy: Any, *given: Any) -> Any:
    return FORWARD(*given[:3], **ATTRS)


def gradients(dy: Any, *given: Any) -> list[Any]:
    return [g.swapaxes(1, 2) for g in GRADS(dy, *given, **ATTRS)]


def both(dy: Any, q: Any, k: Any, v: Any, *_: Any) -> list[Any]:
    return gradients(dy, q, k, v, *FORWARD(q, k, v, **ATTRS))


def test_what_has_heads_before_tokens_is_copied():
    copy = Kernel(2 * NBYTES)
    assert extra_kernels(forward, swapped=True) == [[]]
    assert extra_kernels(forward) == [[copy] * 3]
    assert extra_kernels(gradients) == [[copy] * 3]
    assert extra_kernels(lambda *given: GRADS(*given, **ATTRS), swapped=True) == [[copy] * 3]


def test_a_gradient_takes_the_statistics_of_the_forward_pass():
    assert extra_kernels(gradients, swapped=True) == [[]]
    assert extra_kernels(both, swapped=True) == [[], []]


def test_where_jax_refuses_the_device_at_hand_loops_stand_in(monkeypatch):
    """A plan for an H200 can be made where cuDNN is installed but the GPU is not there."""

    def refuses(*_: Any) -> Any:
        raise NotImplementedError("the head dim must be <= 128")

    rng = np.random.default_rng(0)
    dy, *qkv = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in (OUT, *[SHAPE] * 3))

    def both_ways() -> list[Any]:
        results = FORWARD(*qkv, **ATTRS)
        return [*results, *GRADS(dy, *qkv, *results, **ATTRS)]

    expected = both_ways()
    monkeypatch.setattr(fused_attention, "is_installed", lambda: True)
    for module in (_cudnn_attention, _cudnn_kernels):
        monkeypatch.setattr(module, "run_forward", refuses)
    with tracing_platform("gpu 9.0"):
        found = both_ways()
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_jax_has_the_functions_that_keep_statistics(monkeypatch):
    """Both releases that are supported; another signature would be found."""
    keeps = _cudnn_kernels.keeps_statistics.__wrapped__
    assert keeps()
    monkeypatch.setattr(cudnn, "_dot_product_attention_bwd_rule", lambda res, grads: grads)
    assert not keeps()
    monkeypatch.delattr(cudnn, "_dot_product_attention_bwd_rule")
    assert not keeps()


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


def test_what_is_computed_twice_counts_once() -> None:
    def run(x: Any, y: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) @ y, x.mean(-1), (x + y) @ y, (x + y) @ x, x @ y

    x = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    flat = flatten_jaxpr(jax.make_jaxpr(run)(x, x).jaxpr)
    merge_equal_nodes(flat)
    names = [node.name for node in flat.nodes]
    assert (names.count("reduce_sum"), names.count("add")) == (1, 1)
    assert names.count("dot_general") == 4


def kernels(function: Any, *dtypes: Any) -> list[Kernel]:
    """Kernels of a function of matrices of 16 x 16."""
    specs = [jax.ShapeDtypeStruct((16, 16), dtype) for dtype in dtypes]
    counter = CostCounter(1, "gpu")
    counter.count_function(flatten_jaxpr(jax.make_jaxpr(function)(*specs).jaxpr), 1)
    (cost,) = counter.parts.values()
    return sorted(cost.kernels.elements(), key=lambda kernel: kernel.flops)


HALF, SINGLE, FLOPS = 16 * 16 * 2, 16 * 16 * 4, 2 * 16**3


def test_a_product_adds_a_matrix_or_a_bias_as_it_writes() -> None:
    bf16, f32 = jnp.bfloat16, jnp.float32
    (matrix,) = kernels(lambda a, b, c: a @ b + c, bf16, bf16, bf16)
    assert matrix == Kernel(4 * HALF, FLOPS, added=HALF)
    (bias,) = kernels(lambda a, b: a @ b + jnp.arange(16, dtype=bf16), bf16, bf16)
    assert bias == Kernel(3 * HALF, FLOPS)
    first, second = kernels(lambda a, b, c: a @ b + a @ c, bf16, bf16, bf16)
    assert sorted((first.added, second.added)) == [0, HALF]
    wide = kernels(lambda a, b, c: (a @ b).astype(f32) + c, bf16, bf16, f32)
    assert wide == [Kernel(2 * HALF + 2 * SINGLE, FLOPS, added=2 * SINGLE)]


def test_a_sum_of_another_type_that_is_read_again_is_a_kernel_of_its_own() -> None:
    def read_again(a: Any, b: Any, c: Any) -> Any:
        total = (a @ b).astype(jnp.float32) + c
        return total, jnp.square(total).sum()

    *_, product = kernels(read_again, jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert product == Kernel(3 * HALF, FLOPS)


def test_a_product_of_float8_has_its_operands_transposed() -> None:
    def product(a: Any, b: Any, axes: tuple[int, int]) -> Any:
        dims = (((axes[0],), (axes[1],)), ((), ()))
        return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.bfloat16)

    float8 = [jnp.float8_e4m3fn] * 2
    for axes, copies in (((1, 1), 0), ((1, 0), 1), ((0, 0), 2)):
        found = kernels(partial(product, axes=axes), *float8)
        assert found[:-1] == [Kernel(HALF)] * copies


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_shift_by_zero_changes_no_bit(dtype: Any) -> None:
    bits = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    x = jnp.asarray(bits.view(dtype))
    with tracing_platform("gpu 9.0"):
        found = jax.jit(partial(_computed_apart._shift_by_zero, times=2))(x)
    assert np.asarray(found).tobytes() == bits.tobytes()


def joined(function: Any, *shapes: tuple[int, ...]) -> dict[str, int]:
    """Bytes that each kernel of elements or sums need not read again, by the primitive's name."""
    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    liveness = LivenessModel(flatten_jaxpr(jax.make_jaxpr(function)(*specs).jaxpr), "gpu")
    return {
        node.name: sum(nbytes(v.aval) for v in values)
        for node, values in liveness.joined_reads.items()
        if values
    }


def test_kernels_with_the_same_input_read_it_once():
    """An activation again for its product, its gradient, and that of the bias."""

    def gradients(x: Any, w: Any, dy: Any) -> Any:
        dx = (dy @ w.T) * jnp.cos(x)
        return jnp.tanh(x).T @ dy, dx @ w, dx.sum(0)

    nbytes_of_x = 64 * 32 * 4
    shapes = (64, 32), (32, 32), (64, 32)
    assert joined(gradients, *shapes) == {"tanh": nbytes_of_x, "reduce_sum": nbytes_of_x}


def normalised(x: Any) -> Any:
    return x / x.sum(-1, keepdims=True)


def test_a_kernel_that_needs_the_sums_of_another_reads_again() -> None:
    def both_axes(x: Any) -> Any:
        return x.sum(0), x.sum(1)

    def around_a_product(x: Any) -> Any:
        return jnp.tanh(jnp.exp(x) @ x.T) + x

    for function in (both_axes, around_a_product):
        assert joined(function, (64, 64)) == {}
    assert joined(normalised, (2, 2**14 + 1)) == {}, "XLA's Triton kernels hold shorter rows"


def test_a_kernel_that_normalises_rows_reads_them_once() -> None:
    def layer_norm(x: Any, w: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True)) * w

    nbytes_of_x = 64 * 32 * 4
    assert joined(normalised, (64, 32)) == {"div": nbytes_of_x}
    found = joined(layer_norm, (64, 32), (32,))
    assert found == {"reduce_sum": nbytes_of_x, "mul": nbytes_of_x + 64 * 4}


def test_a_norms_gradient_reads_rows_again_after_their_sums() -> None:
    """Two kernels: sums of rows, then the gradients of the input and, by columns, the weight."""

    def gradients(x: Any, dy: Any) -> Any:
        scale = jax.lax.rsqrt((x * x).mean(-1, keepdims=True))
        along = (dy * x).mean(-1, keepdims=True)
        return scale * (dy - scale * scale * x * along), (dy * x * scale).sum(0)

    nbytes_of_x = 64 * 32 * 4
    assert joined(gradients, (64, 32), (64, 32)) == {"reduce_sum": 2 * nbytes_of_x + 64 * 4}


def test_gelus_gradient_on_a_gpu_is_that_of_torch():
    x = np.concatenate([np.linspace(-12, 12, 1001), [-3e4, -1e3, 1e3, 3e4]]).astype(np.float32)
    dy = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
    wide = torch.tensor(x.astype(np.float64), requires_grad=True)
    torch.nn.functional.gelu(wide, approximate="tanh").backward(torch.tensor(dy.astype(np.float64)))
    with tracing_platform("gpu 9.0"):
        found = activation._GELU_GRAD.lower(jnp.asarray(x), jnp.asarray(dy))
    np.testing.assert_allclose(found, wide.grad, rtol=2e-6, atol=2e-6)


def test_layer_norms_gradients_on_a_gpu_are_those_of_torch() -> None:
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((3, 5, 64)).astype(np.float32) for _ in range(2))
    w, b = (rng.standard_normal(64).astype(np.float32) for _ in range(2))
    x = 3 * x + 7
    wide = [torch.tensor(t.astype(np.float64), requires_grad=True) for t in (x, w, b)]
    y = torch.nn.functional.layer_norm(wide[0], (64,), *wide[1:], eps=1e-5)
    y.backward(torch.tensor(dy.astype(np.float64)))
    with tracing_platform("gpu 9.0"):
        found = normalisation._layer_norm_grads(*map(jnp.asarray, (x, w, b, dy)), eps=1e-5)
    for ours, theirs in zip(found, wide, strict=True):
        np.testing.assert_allclose(ours, theirs.grad, rtol=2e-5, atol=2e-5)
