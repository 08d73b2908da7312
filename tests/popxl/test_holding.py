"""Held values: what XLA makes of a graph does not depend on what surrounds the graph."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._core.op import emit
from popxl._core.verify import verify_ir
from popxl.ops._hold import HOLD
from popxl.transforms import (
    ExpectedConnectionType,
    GradGraphInfo,
    autodiff,
    hold_activations,
)
from tests.popxl.programs import f32, graph_of, run

X = f32(4, 3)


def _hold(t: popxl.Tensor) -> popxl.Tensor:
    return emit(HOLD, [t])[0]


def test_a_held_product_is_rounded_before_it_is_added():
    a, b, c = (f32(1000, seed=s) for s in range(3))
    (found,) = run(lambda a, b, c: _hold(a * b) + c, a, b, c)
    np.testing.assert_array_equal(found, a * b + c)


@pytest.mark.parametrize("dtype", [np.float16, np.int32])
def test_any_type_and_shape_can_be_held(dtype: type) -> None:
    for x in (np.asarray(3, dtype), np.arange(6).reshape(2, 3).astype(dtype)):
        (found,) = run(_hold, x)
        np.testing.assert_array_equal(found, x)


def _shares(x: popxl.Tensor) -> popxl.Tensor:
    """tanh's gradient takes `curve`; nothing takes `double`, which more than `curve` needs."""
    double = ops.add(x, x)
    curve = ops.tanh(double)
    return ops.add(double, ops.negate(curve))


def test_what_is_taken_or_shared_is_held_and_nothing_else():
    ir = popxl.Ir()
    graph = ir.create_graph(_shares, popxl.TensorSpec((4, 3), popxl.float32))
    info = autodiff(graph)
    wanted = graph.outputs[0]
    hold_activations(info, graph.inputs, [wanted])
    verify_ir(ir)
    assert [op.name for op in graph.ops] == ["add", "hold", "tanh", "hold", "negate", "add"]
    assert [op.name for op in info.graph.ops].count("hold") == 1
    assert graph.outputs[0] is wanted


def test_inputs_that_do_not_vary_are_not_held():
    ir = popxl.Ir()
    spec = popxl.TensorSpec((3, 3), popxl.float32)
    graph = ir.create_graph(lambda x, w: x @ w, spec, spec)
    info = autodiff(graph)
    hold_activations(info, graph.inputs[:1], graph.outputs[:1])
    held = [op.inputs[0].name for op in info.graph.ops if op.name == "hold"]
    assert held == [f"fwd_{graph.inputs[0].name}"]


def _unstable(x: popxl.Tensor) -> popxl.Tensor:
    """Its root is kept, which turns rsqrt into a division; its products are summed."""
    root = ops.sqrt(ops.mean(x * x, -1, keepdims=True) + 1e-6)
    y = x / root
    return ops.gelu(y * 1.1 + 0.3) * y + x


def _graphs(called: bool, held: bool) -> tuple[popxl.Graph, GradGraphInfo]:
    """`_unstable`, or a graph that calls it, and its gradient, in the current program."""
    spec = popxl.TensorSpec((64, 48), popxl.float32)
    graph = graph_of(_unstable, spec)
    if called:
        inner = graph
        graph = graph_of(lambda x: ops.call(inner, x)[0] * 0.7, spec)
    info = autodiff(graph)
    if held:
        hold_activations(info, graph.inputs, graph.outputs[:1])
    return graph, info


def _different_elements(called: bool, held: bool = True) -> tuple[int, int]:
    """How many elements of the output and of the gradient depend on what is stored."""
    x, dy = f32(64, 48, seed=3), f32(64, 48, seed=4)

    def alone(x: popxl.Tensor) -> popxl.Tensor:
        return ops.call(_graphs(called, held)[0], x)[0]

    def keeping(x: popxl.Tensor) -> list[popxl.Tensor]:
        graph, info = _graphs(called, held)
        site = ops.call_with_info(graph, x)
        return [site.outputs[0], *info.inputs_dict(site).values()]

    def from_kept(dy: popxl.Tensor, *kept: popxl.Tensor) -> popxl.Tensor:
        _, info = _graphs(called, held)
        takes = [
            t
            for t, c in zip(info.graph.inputs, info.expected_inputs, strict=True)
            if c.connection_type is ExpectedConnectionType.Fwd
        ]
        return ops.call(info.graph, dy, inputs_dict=dict(zip(takes, kept, strict=True)))[0]

    def again(dy: popxl.Tensor, x: popxl.Tensor) -> popxl.Tensor:
        graph, info = _graphs(called, held)
        site = ops.call_with_info(graph, x)
        return ops.call(info.graph, dy, inputs_dict=info.inputs_dict(site))[0]

    y, *kept = run(keeping, x)
    pairs = [(run(alone, x)[0], y), (run(again, dy, x)[0], run(from_kept, dy, *kept)[0])]
    found = tuple(int((a != b).sum()) for a, b in pairs)
    return found[0], found[1]


@pytest.mark.parametrize("called", [False, True])
def test_the_same_bits_whether_what_is_taken_is_stored_or_computed_again(called: bool) -> None:
    assert _different_elements(called) == (0, 0)
