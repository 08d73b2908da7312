"""Sums of gradients as running sums: the text before and after, and equal values."""

from __future__ import annotations

import numpy as np
import torch

import popxl
from popxl import ops
from popxl._analysis.verify import verify_ir
from popxl.transforms import autodiff, decompose_sum
from tests.popxl.programs import f32, run_ir, store

X = f32(4, 3)


def _lines(graph: popxl.Graph) -> list[str]:
    """The ops of a graph in short: `result = op(inputs)`."""
    found = []
    for op in graph.ops:
        ins = ", ".join("dy" if t in graph.inputs else t.name for t in op.inputs)
        outs = ", ".join(t.name for t in op.outputs)
        found.append(f"{outs} = {op.name}({ins})")
    return found


def _uses(x):
    return ops.add(ops.add(ops.negate(x), x), ops.add(ops.negate(x), x))


def test_each_term_is_added_as_soon_as_it_is_there():
    ir = popxl.Ir()
    with ir.main_graph:
        graph = ir.create_graph(_uses, popxl.variable(X))
        grad = autodiff(graph).graph
        before = _lines(grad)
        sums = [op for op in grad.ops if op.name == "grad_sum"]
        assert len(sums) == 1
        assert decompose_sum(grad) is grad
    after = _lines(grad)
    verify_ir(ir)
    assert before == [
        "negate_out = negate(dy)",
        "negate_out__t0 = negate(dy)",
        "grad_sum_out = grad_sum(dy, negate_out, dy, negate_out__t0)",
    ]
    assert after == [
        "sum = add(dy, dy)",
        "negate_out = negate(dy)",
        "sum__t0 = add(sum, negate_out)",
        "negate_out__t0 = negate(dy)",
        "grad_sum_out = add(sum__t0, negate_out__t0)",
    ]


def _branching(x, w):
    h = x @ w
    for _ in range(2):
        h = ops.tanh(h) + (x @ w) * ops.sin(h)
    return h * x


def _gradients(decompose: bool) -> list[np.ndarray]:
    ir = popxl.Ir()
    with ir.main_graph:
        x, w = popxl.variable(X), popxl.variable(f32(3, 3, seed=1))
        graph = ir.create_graph(_branching, x, w)
        info = autodiff(graph)
        if decompose:
            decompose_sum(info.graph)
            assert not [op for op in info.graph.ops if op.name == "grad_sum"]
        else:
            assert [op for op in info.graph.ops if op.name == "grad_sum"]
        call = ops.call_with_info(graph, x, w)
        seed = popxl.constant(np.ones(X.shape, np.float32))
        grads = ops.call(info.graph, seed, inputs_dict=info.inputs_dict(call))
    return run_ir(ir, [store(g) for g in _in(ir, grads)])


def _in(ir: popxl.Ir, tensors):
    with ir.main_graph:
        yield from tensors


def test_values_stay_the_same():
    for a, b in zip(_gradients(False), _gradients(True), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_graphs_without_sums_stay_as_they_are():
    ir = popxl.Ir()
    with ir.main_graph:
        graph = ir.create_graph(lambda x: ops.sin(x) + ops.add(x, x), popxl.variable(X))
    before = str(graph)
    decompose_sum(graph)
    assert str(graph) == before


def test_sums_of_graph_inputs_only_start_the_graph():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(X)
        graph = ir.create_graph(lambda a, b, c: a + b + c + a + b, x, x, x)
        info = autodiff(graph)
        decompose_sum(info.graph)
        verify_ir(ir)
        call = ops.call_with_info(graph, x, x, x)
        seed = popxl.constant(np.ones(X.shape, np.float32))
        grads = ops.call(info.graph, seed, inputs_dict=info.inputs_dict(call))
        results = list(map(store, grads))
    for found, n in zip(run_ir(ir, results), (2, 2, 1), strict=True):
        np.testing.assert_array_equal(found, np.full(X.shape, n))


def test_a_sum_of_sums_and_two_outputs_of_one_op():
    """Terms that stand at one place, and a sum that another sum needs."""

    def build(x):
        a, b = ops.split(x, 2, 1)
        h = ops.add(ops.add(a, b), ops.add(a, ops.mul(a, b)))
        return ops.add(ops.concat([h, h], 1), ops.add(x, x))

    def reference(x):
        a, b = torch.split(x, 2, 1)
        h = a + b + a + a * b
        return torch.cat([h, h], 1) + x + x

    data = f32(3, 4)
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(data)
        graph = ir.create_graph(build, x)
        info = autodiff(graph)
        sums = sum(op.name == "grad_sum" for op in info.graph.ops)
        assert sums >= 3
        decompose_sum(info.graph)
        assert not [op for op in info.graph.ops if op.name == "grad_sum"]
        call = ops.call_with_info(graph, x)
        seed = popxl.constant(np.ones(data.shape, np.float32))
        (dx,) = ops.call(info.graph, seed, inputs_dict=info.inputs_dict(call))
        out = store(dx)
    (found,) = run_ir(ir, [out])
    t = torch.tensor(data, dtype=torch.float64, requires_grad=True)
    reference(t).sum().backward()
    np.testing.assert_allclose(found, t.grad.numpy(), rtol=1e-5, atol=1e-6)
