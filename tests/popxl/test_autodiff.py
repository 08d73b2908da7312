"""Gradient graphs against torch, and how they connect to the forward graph."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import popxl
from popxl import ops
from popxl._analysis.verify import verify_ir
from popxl.errors import popart_exception
from popxl.transforms import ExpectedConnectionType, GradGraphInfo, autodiff
from popxl.transforms import gradient_ops as gradients_module
from tests.popxl.programs import as_list, f32, graph_of, run, run_ir, store
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("compiled_quickly")

X, W, B = f32(4, 3), f32(3, 3, seed=1), f32(3, seed=2)


def gradients(fn, *inputs: np.ndarray) -> list[np.ndarray]:
    """Outputs of `fn` and the gradients of all its inputs, for output gradients 1, 2, ..."""

    def build(*tensors):
        graph = graph_of(fn, *tensors)
        count = len(graph.outputs)
        call = ops.call_with_info(graph, *tensors)
        info = autodiff(graph)
        seeds = [_seed(t, i) for i, t in enumerate(graph.outputs[:count])]
        grads = ops.call(info.graph, *seeds, inputs_dict=info.inputs_dict(call))
        assert [c.fwd_tensor for c in info.expected_outputs] == list(graph.inputs)
        return [*call.outputs[:count], *grads]

    return run(build, *inputs)


def _seed(t: popxl.Tensor, i: int) -> popxl.Constant:
    return popxl.constant(np.full(t.shape, i + 1, np.float32))


def torch_gradients(fn, *inputs: np.ndarray) -> list[np.ndarray]:
    """Gradients of the same function by torch, in float64."""
    tensors = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in inputs]
    outputs = as_list(fn(*tensors))
    sum((i + 1) * y.sum() for i, y in enumerate(outputs)).backward()
    return [*(y.detach().numpy() for y in outputs), *(t.grad.numpy() for t in tensors)]


def check(fn, reference, *inputs: np.ndarray) -> None:
    found, expected = gradients(fn, *inputs), torch_gradients(reference, *inputs)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def _gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


# ---- plain graphs -------------------------------------------------------------------------------
def test_a_layer():
    check(
        lambda x, w, b: ops.gelu(x @ w + b),
        lambda x, w, b: _gelu(x @ w + b),
        X, W, B,
    )  # fmt: skip


def test_a_tensor_used_several_times_gets_the_sum():
    check(
        lambda x, w: (x @ w) * x + ops.sin(x) * (x @ w),
        lambda x, w: (x @ w) * x + torch.sin(x) * (x @ w),
        X, W,
    )  # fmt: skip


def test_several_outputs_and_an_output_that_is_an_input():
    check(lambda x, b: (x * b, ops.exp(x), b), lambda x, b: (x * b, torch.exp(x), b), X, B)


def test_one_output_returned_twice():
    check(
        lambda x: [ops.tanh(x)] * 2,
        lambda x: [torch.tanh(x)] * 2,
        X,
    )  # fmt: skip


def test_constants_views_and_slices():
    def fn(x, w):
        y = ops.slice_(x, 1, 3).T_ * popxl.constant(2.0)
        return ops.concat([y, w[:, 1:]], axis=1).reshape_((2, 6)) * 3.0

    def reference(x, w):
        return torch.cat([x[1:3].T * 2, w[:, 1:]], 1).reshape(2, 6) * 3

    check(fn, reference, X, W)


# ---- in place -----------------------------------------------------------------------------------
def _by_call(x, count):
    def changes(t: popxl.TensorByRef):
        ops.exp_(t)

    h = x * 2.0
    ops.call(graph_of(changes, h), h)
    return h * h


def _by_view(x, count):
    ops.relu_(ops.slice_(x * 2.0, 0, 2))
    return x * 3.0


def _beside(x, count):
    ops.var_updates.accumulate_(count, popxl.constant(1, popxl.int32))
    return x * 3.0


def _on_the_way(x, count):
    h = x * 2.0
    h += x
    return h


MODIFYING = {
    "an input": lambda x, count: ops.gelu_(x),
    "a value on the way": _on_the_way,
    "through a view": _by_view,
    "in a called graph": _by_call,
    "beside the gradient": _beside,
    "the only op": lambda x, count: ops.var_updates.copy_var_update_(x, x + 1.0),
    "an integer": lambda x, count: ops.add_(count, popxl.constant(1, popxl.int32)),
    "a collective": lambda x, count: ops.collectives.replicated_all_reduce_(x * 2.0),
}


@pytest.mark.parametrize("name", MODIFYING)
def test_a_graph_that_changes_a_value_in_place_is_refused_by_name(ir, name):
    graph = ir.create_graph(MODIFYING[name], popxl.variable(X), popxl.variable(0, popxl.int32))
    with pytest.raises(popart_exception, match=re.escape(graph.id)):
        autodiff(graph)


def test_a_called_graph_that_changes_its_own_values_is_refused(ir):
    def inner(x):
        h = x * 2.0
        ops.exp_(h)
        return h

    x = popxl.variable(X)
    called = ir.create_graph(inner, x)
    with pytest.raises(popart_exception, match=re.escape(called.id)):
        autodiff(ir.create_graph(lambda t: ops.call(called, t)[0] * 3.0, x))


def test_views_in_place_are_differentiated():
    def fn(x, w):
        whole = ops.concat_([x.transpose_(), w], axis=1)
        part = ops.slice_(whole, 1, 6, axis=1).reshape_((5, 3))
        return part * part.flatten_().reshape_((5, 3))

    def reference(x, w):
        part = torch.cat([x.T, w], 1)[:, 1:6].reshape(5, 3)
        return part * part

    check(fn, reference, X, W)


# ---- calls --------------------------------------------------------------------------------------
def test_calls_and_calls_inside_calls():
    def inner(x, w):
        return ops.tanh(x @ w), x * 2.0

    def middle(x, w):
        a, b = ops.call(graph_of(inner, x, w), x, w)
        return a * b

    def fn(x, w):
        graph = graph_of(middle, x, w)
        (y,) = ops.call(graph, x, w)
        (z,) = ops.call(graph, y, w)
        return y + z

    def torch_middle(x, w):
        return torch.tanh(x @ w) * (x * 2)

    def reference(x, w):
        y = torch_middle(x, w)
        return y + torch_middle(y, w)

    check(fn, reference, X, W)


def test_a_tensor_passed_twice_to_a_call():
    def fn(x):
        graph = graph_of(lambda a, b: a * ops.sin(b), x, x)
        return ops.call(graph, x, x)

    check(fn, lambda x: x * torch.sin(x), X)


def test_an_output_of_a_call_that_is_not_used():
    def fn(x):
        graph = graph_of(lambda a: (ops.sin(a), ops.exp(a)), x)
        return ops.call(graph, x)[1] * 3.0

    check(fn, lambda x: torch.exp(x) * 3, X)


def test_given_gradient_graphs_of_called_graphs_are_used(ir):
    x, w = popxl.variable(X), popxl.variable(W)
    inner = ir.create_graph(lambda a, b: ops.tanh(a @ b), x, w)
    outer = ir.create_graph(lambda a, b: ops.call(inner, a, b)[0] * 2.0, x, w)
    inner_info = autodiff(inner)
    info = autodiff(outer, called_graphs_grad_info={inner: inner_info})
    assert inner_info.graph in info.graph.called_graphs
    call = ops.call_with_info(outer, x, w)
    seed = popxl.constant(np.ones((4, 3), np.float32))
    grads = ops.call(info.graph, seed, inputs_dict=info.inputs_dict(call))
    verify_ir(ir)
    expected = torch_gradients(lambda a, b: torch.tanh(a @ b) * 2, X, W)[1:]
    for a, b in zip(run_ir(ir, list(map(store, grads))), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_given_gradient_graph_that_recomputes_is_respected(ir):
    """The gradient graph runs the forward graph, as after popxl_addons' `recompute_graph`."""
    x = popxl.variable(X)
    inner = ir.create_graph(lambda a: ops.exp(ops.sin(a)), x)
    original = autodiff(inner)

    def recompute(a, dy):
        again = ops.call_with_info(inner, a)
        return ops.call(original.graph, dy, inputs_dict=original.inputs_dict(again))

    graph = ir.create_graph(recompute, x, x)
    source = inner.inputs[0]
    fwd, grad = ExpectedConnectionType.Fwd, ExpectedConnectionType.FwdGrad
    connect = type(original.expected_inputs[0])._make
    info = GradGraphInfo._make(
        graph, inner, (connect(source, fwd), connect(inner.outputs[0], grad)),
        (connect(source, grad),),
    )  # fmt: skip
    outer = ir.create_graph(lambda a: ops.call(inner, a)[0] * 2.0, x)
    whole = autodiff(outer, called_graphs_grad_info={inner: info})
    call = ops.call_with_info(outer, x)
    seed = popxl.constant(np.ones((4, 3), np.float32))
    (found,) = ops.call(whole.graph, seed, inputs_dict=whole.inputs_dict(call))
    assert graph in whole.graph.called_graphs
    (value,) = run_ir(ir, [store(found)])
    np.testing.assert_allclose(value, 2 * np.exp(np.sin(X)) * np.cos(X), rtol=1e-4)


def test_all_gradient_graphs_can_be_returned(ir):
    x = popxl.variable(X)
    inner = ir.create_graph(ops.sin, x)
    outer = ir.create_graph(lambda a: ops.call(inner, a), x)
    infos = autodiff(outer, return_all_grad_graphs=True)
    assert set(infos) == {inner, outer}
    assert infos[outer].forward_graph is outer
    assert infos[inner].graph in infos[outer].graph.called_graphs


# ---- loops and branches -------------------------------------------------------------------------
@pytest.mark.parametrize("count", [0, slow(1), 4])
def test_loops(count):
    def fn(x, w):
        return ops.repeat(graph_of(lambda a, b: ops.tanh(a @ b) + a, x, w), count, x, w)

    def reference(x, w):
        y = x * 1.0
        for _ in range(count):
            y = torch.tanh(y @ w) + y
        return y + 0 * w.sum()

    check(fn, reference, X, W)


@pytest.mark.parametrize("taken", [True, False])
def test_branches(taken):
    def fn(x, w):
        cond = popxl.constant(taken)
        then, otherwise = graph_of(lambda a: ops.sin(a), x), graph_of(lambda a, b: a @ b, x, w)
        return ops.conditional(cond, then, otherwise, [x * 2.0], [x, w])

    def reference(x, w):
        return torch.sin(x * 2) + 0 * w.sum() if taken else x @ w

    check(fn, reference, X, W)


def test_a_loop_in_a_call_in_a_loop():
    def fn(x, w):
        step = graph_of(lambda a, b: ops.tanh(a @ b), x, w)
        twice = graph_of(lambda a, b: ops.repeat(step, 2, a, b)[0] * 1.5, x, w)
        outer = graph_of(lambda a, b: ops.call(twice, a, b), x, w)
        return ops.repeat(outer, 2, x, w)

    def reference(x, w):
        for _ in range(2):
            x = torch.tanh(torch.tanh(x @ w) @ w) * 1.5
        return x

    check(fn, reference, X, W)


def test_loops_that_touch_state_cannot_be_differentiated(ir):
    buffer = popxl.remote_buffer((4, 3), popxl.float32)

    def step(a):
        return a + ops.remote_load(buffer, 0)

    x = popxl.variable(X)
    inner = ir.create_graph(step, x)
    graph = ir.create_graph(lambda a: ops.repeat(inner, 2, a), x)
    with pytest.raises(popart_exception, match=r"repeat at .* cannot be differentiated"):
        autodiff(graph)


# ---- what is provided and required --------------------------------------------------------------
def test_required_gradients_come_in_the_order_asked_for(ir):
    a, b, c = (popxl.variable(f32(2, seed=i)) for i in range(3))
    graph = ir.create_graph(lambda p, q, r: p * q * r, a, b, c)
    p, _, r = graph.inputs
    info = autodiff(graph, grads_required=[r, p])
    assert info.outputs == (r, p)
    assert [c.connection_type for c in info.expected_outputs] == [
        ExpectedConnectionType.FwdGrad
    ] * 2
    call = ops.call_with_info(graph, a, b, c)
    grads = ops.call(info.graph, popxl.constant([1.0, 1.0]), inputs_dict=info.inputs_dict(call))
    found = run_ir(ir, list(map(store, grads)))
    values = [f32(2, seed=i) for i in range(3)]
    np.testing.assert_allclose(found[0], values[0] * values[1], rtol=1e-6)
    np.testing.assert_allclose(found[1], values[1] * values[2], rtol=1e-6)


def test_only_provided_gradients_flow(ir):
    x = popxl.variable(X)
    graph = ir.create_graph(lambda a: (ops.sin(a), ops.exp(a)), x)
    info = autodiff(graph, grads_provided=[graph.outputs[1]])
    given = [c for c in info.expected_inputs if c.connection_type.name == "FwdGrad"]
    assert [c.fwd_tensor for c in given] == [graph.outputs[1]]
    call = ops.call_with_info(graph, x)
    seed = popxl.constant(np.full(X.shape, 2, np.float32))
    (grad,) = ops.call(info.graph, seed, inputs_dict=info.inputs_dict(call))
    np.testing.assert_allclose(run_ir(ir, [store(grad)])[0], 2 * np.exp(X), rtol=1e-5)


def test_gradients_of_intermediates_can_be_required(ir):
    x = popxl.variable(X)
    hidden = []

    def fn(a):
        hidden.append(ops.sin(a))
        return hidden[0] * hidden[0]

    graph = ir.create_graph(fn, x)
    info = autodiff(graph, grads_required=[hidden[0], graph.inputs[0]])
    call = ops.call_with_info(graph, x)
    seed = popxl.constant(np.ones(X.shape, np.float32))
    grads = ops.call(info.graph, seed, inputs_dict=info.inputs_dict(call))
    found = run_ir(ir, list(map(store, grads)))
    np.testing.assert_allclose(found[0], 2 * np.sin(X), rtol=1e-5)
    np.testing.assert_allclose(found[1], 2 * np.sin(X) * np.cos(X), rtol=1e-4, atol=1e-6)


def test_integer_inputs_have_no_gradient_and_unused_ones_zeros_if_asked(ir):
    x, i, unused = popxl.variable(X), popxl.variable([2, 0, 2], popxl.int32), popxl.variable(B)
    graph = ir.create_graph(lambda a, b, c: ops.gather(a, b) * 2.0, x, i, unused)
    a, _, c = graph.inputs
    assert autodiff(graph).outputs == (a,)
    info = autodiff(graph, grads_required=[c, a])
    call = ops.call_with_info(graph, x, i, unused)
    seed = popxl.constant(np.ones((3, 3), np.float32))
    zeros, grad = run_ir(
        ir, list(map(store, ops.call(info.graph, seed, inputs_dict=info.inputs_dict(call))))
    )
    np.testing.assert_array_equal(zeros, np.zeros(3))
    np.testing.assert_array_equal(grad, np.array([2, 0, 4, 0])[:, None] * np.ones(3))


def test_detached_values_pass_no_gradient():
    def fn(x):
        return ops.detach(x) * x

    y, grad = gradients(fn, X)
    np.testing.assert_allclose(y, X * X, rtol=1e-6)
    np.testing.assert_allclose(grad, X, rtol=1e-6)


def test_tensors_of_other_graphs_are_refused(ir):
    x = popxl.variable(X, name="x")
    graph = ir.create_graph(ops.sin, x)
    for kwargs in ({"grads_provided": [x]}, {"grads_required": [x]}):
        with pytest.raises(ValueError, match="is no tensor of graph"):
            autodiff(graph, **kwargs)


# ---- connections --------------------------------------------------------------------------------
def test_only_values_that_are_needed_become_inputs(ir):
    x, w = popxl.variable(X), popxl.variable(W)
    graph = ir.create_graph(lambda a, b: (a @ b) + 1.0, x, w)
    info = autodiff(graph)
    kinds = [c.connection_type.name for c in info.expected_inputs]
    assert kinds == ["FwdGrad", "Fwd", "Fwd"]
    assert set(info.inputs[1:]) == set(graph.inputs)
    assert len(graph.outputs) == 1
    assert not autodiff(ir.create_graph(lambda a: a + 1.0, x)).inputs_dict(
        ops.call_with_info(graph, x, w)
    )


def test_the_dictionaries_lead_from_the_forward_call_to_the_gradients(ir):
    x, w = popxl.variable(X), popxl.variable(W)
    graph = ir.create_graph(lambda a, b: ops.sin(a @ b), x, w)
    info = autodiff(graph)
    call = ops.call_with_info(graph, x, w)
    seed = popxl.constant(np.ones(X.shape, np.float32))
    grad_call = ops.call_with_info(info.graph, seed, inputs_dict=info.inputs_dict(call))
    by_graph_tensor = info.fwd_graph_ins_to_grad_parent_outs(grad_call)
    by_parent_tensor = info.fwd_parent_ins_to_grad_parent_outs(call, grad_call)
    assert by_graph_tensor == dict(zip(graph.inputs, grad_call.outputs, strict=True))
    assert by_parent_tensor == {x: grad_call.outputs[0], w: grad_call.outputs[1]}
    assert info.graph.name.endswith("_grad_subgraph(0)")
    assert "FwdGrad" in repr(info)


@pytest.mark.parametrize("times", [slow(2), 3])
def test_a_tensor_that_is_given_several_times_gets_the_sum_of_its_gradients(times):
    def build(x, w):
        inputs = [x, w, *[x] * (times - 1)]
        graph = graph_of(lambda a, b, *more: sum((m * a for m in more), ops.sin(a @ b)), *inputs)
        info = autodiff(graph)
        call = ops.call_with_info(graph, *inputs)
        seed = popxl.constant(np.ones(X.shape, np.float32))
        grad_call = ops.call_with_info(info.graph, seed, inputs_dict=info.inputs_dict(call))
        found = info.fwd_parent_ins_to_grad_parent_outs(call, grad_call)
        assert list(found) == [x, w]
        return found[x], found[w]

    def reference(x, w):
        y = torch.sin(x @ w) + (times - 1) * x * x
        return torch.autograd.grad(y.sum(), [x, w], create_graph=True)

    check(build, reference, X, W)


def test_second_derivatives():
    """A graph that calls a gradient graph is differentiated like any other."""

    def gradient(x, w):
        graph = graph_of(lambda a, b: ops.tanh(a @ b) * a, x, w)
        info = autodiff(graph)
        call = ops.call_with_info(graph, x, w)
        ones = popxl.constant(np.ones(X.shape, np.float32))
        return ops.call(info.graph, ones, inputs_dict=info.inputs_dict(call))

    def reference(x, w):
        y = torch.tanh(x @ w) * x
        return torch.autograd.grad(y.sum(), [x, w], create_graph=True)

    check(gradient, reference, X, W)


# ---- what gradient graphs are made of -----------------------------------------------------------
def test_the_text_of_what_autodiff_returns():
    ir = popxl.Ir()
    with ir.main_graph:
        text = repr(autodiff(ir.create_graph(lambda x: x * x, popxl.variable(X))))
    assert re.fullmatch(
        r"GradGraphInfo\[\s*graph=.*expected_inputs=\[\(FwdGrad.*\(Fwd,.*"
        r"expected_outputs=\[\(FwdGrad.*\]\s*\]",
        text,
        re.DOTALL,
    )


def test_a_constant_used_several_times_is_one_in_the_gradient_graph():
    def build(x):
        c = popxl.constant(W, name="c")
        return ((x @ c) @ c) @ c + x * popxl.constant(3.0)

    ir = popxl.Ir()
    with ir.main_graph:
        info = autodiff(ir.create_graph(build, popxl.variable(X)))
    assert sum(np.array_equal(c._data, W) for c in info.graph.constants) == 1
    (found, dx), w = gradients(build, X), W.astype(np.float64)
    np.testing.assert_allclose(found, X @ w @ w @ w + 3 * X, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(dx, np.ones_like(X) @ (w @ w @ w).T + 3, rtol=2e-4, atol=2e-5)


def test_what_is_observed_takes_one_look_at_each_op(monkeypatch):
    """A long graph that calls a long graph often: the looks grow with the ops, not their square."""
    looks = 0
    entered = gradients_module._callee_inputs

    def counted(op, index):
        nonlocal looks
        looks += 1
        return entered(op, index)

    monkeypatch.setattr(gradients_module, "_callee_inputs", counted)
    length = 50

    def inner(x):
        for _ in range(length):
            x = ops.add(x, x)
        return x

    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(X)
        called = ir.create_graph(inner, x)

        def outer(x):
            for _ in range(length):
                (y,) = ops.call(called, x)
                x = ops.add(x, y)
            return x

        graph = ir.create_graph(outer, x)
        assert gradients_module.tensors_with_max_gradient(graph) == set()
        assert looks == 5 * length
        looks = 0
        autodiff(graph)
        assert looks <= 7 * length  # the called graph is looked at again for its own gradient
