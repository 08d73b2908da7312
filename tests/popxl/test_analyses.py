"""Memoization of analyses: once for each graph, and again after a change."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import popxl
from popxl import ops
from popxl._analysis import effects, memo, shape_inference
from popxl._analysis.effects import graph_effects, program_effects
from popxl._analysis.functionalization import _FunctionalizePass
from popxl._ir.op import Op
from popxl.errors import SpecError, popart_exception
from popxl.transforms import autodiff
from popxl_addons.transforms.repeat_graph import repeat_graph
from tests.popxl.programs import f32, run, store

DEPTH = 6


def _fan(depth: int, changes: bool) -> tuple[popxl.Ir, popxl.DeviceToHostStream]:
    """Graphs of which each calls the one below it twice: 2 ** depth calls in a run."""
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.ones(2, np.float32))

        def leaf(t: popxl.TensorByRef, u: popxl.Tensor) -> popxl.Tensor:
            if changes:
                ops.add_(t, u)
            return ops.sin(t)

        graph = ir.create_graph(leaf, x, x)
        for _ in range(depth):

            def level(t: popxl.TensorByRef, u: popxl.Tensor, below: Any = graph) -> popxl.Tensor:
                (a,) = ops.call(below, t, u)
                (b,) = ops.call(below, t, a)
                return a + b

            graph = ir.create_graph(level, x, x)
        (y,) = ops.call(graph, x, ops.identity(x))
        return ir, store(y)


def _visits(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often analyses look at an op; the counter goes on counting."""
    seen: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def looked(*args: Any) -> Any:
            seen[name] += 1
            return function(*args)

        monkeypatch.setattr(owner, name, looked)

    counted(effects, "op_effects")
    counted(_FunctionalizePass, "run")
    counted(Op, "modified_inputs")
    return seen


@pytest.mark.parametrize("changes", [False, True], ids=["pure", "by reference"])
def test_building_and_analysing_takes_time_linear_in_the_number_of_graphs(monkeypatch, changes):
    seen = _visits(monkeypatch)
    found = []
    for depth in (DEPTH, 2 * DEPTH):
        seen.clear()
        ir, _ = _fan(depth, changes)
        program_effects(ir)
        _ = ir.main_graph.functional.transfer_counts
        found.append(dict(seen))
    for name, visits in found[1].items():
        assert visits <= 2 * found[0][name] + 10, (name, found)
        assert visits <= 20 * 2 * DEPTH


def _graph_with_a_call(ir: popxl.Ir) -> tuple[popxl.Graph, popxl.Graph, Any]:
    x = popxl.variable(np.ones(2, np.float32))
    inner = ir.create_graph(lambda t: ops.sin(t), x)
    info: list[Any] = []

    def outer(t: popxl.TensorByRef) -> popxl.Tensor:
        info.append(ops.call_with_info(inner, t))
        return info[0].outputs[0]

    return inner, ir.create_graph(outer, x), info[0]


def test_a_graph_that_changes_later_is_looked_at_anew(ir):
    inner, outer, call = _graph_with_a_call(ir)
    stream, out = popxl.h2d_stream((2,), popxl.float32), popxl.d2h_stream((2,), popxl.float32)
    assert outer.functional.changed == ()
    assert not graph_effects(outer)
    assert not outer.functional.transfer_counts
    with inner:
        ops.add_(inner.inputs[0], ops.host_load(stream))
    assert inner.functional.changed == (0,)
    assert outer.functional.changed == ()  # by value
    assert list(graph_effects(outer).loads) == [stream]
    assert outer.functional.transfer_counts == {stream: 1}
    call.set_parent_input_modified(call.parent_input(0))
    assert outer.functional.changed == (0,)
    with outer:
        ops.host_store(out, outer.outputs[0])
    assert list(graph_effects(outer).stores) == [out]
    assert list(program_effects(ir).stores) == []
    ops.call(outer, popxl.variable(np.ones(2, np.float32)))
    assert list(program_effects(ir).stores) == [out]


def test_moved_ops_count_where_they_are_now(ir):
    stream = popxl.d2h_stream((), popxl.float32)
    x = popxl.variable(1.0)
    inner = ir.create_graph(lambda t: ops.sin(t), x)

    def outer(t):
        return ops.call(inner, t)[0]

    graph = ir.create_graph(outer, x)
    assert not graph_effects(graph)
    body = repeat_graph(graph, 2)
    assert not graph_effects(body)
    with inner:
        ops.host_store(stream, inner.inputs[0])
    assert graph.functional.transfer_counts == {stream: 2}
    assert list(graph_effects(body).stores) == [stream]


def test_outputs_that_autodiff_adds_are_seen(ir):
    x = popxl.variable(np.ones(2, np.float32))
    inner = ir.create_graph(lambda t: ops.sin(t) * ops.exp(t), x)
    outer = ir.create_graph(lambda t: ops.call(inner, t)[0], x)
    before = outer.functional.changed
    autodiff(outer)
    assert outer.functional.changed == before == ()
    assert outer not in inner._known


LOOKS = {
    "a print": lambda info, x: str(info.graph.functional),
    "a call with two references": lambda info, x: ops.call(
        popxl.gir().create_graph(_changed_by_gradients, info.graph, *[x] * 3),
        ops.identity(x), ops.identity(x), x,
    ),
}  # fmt: skip


def _changed_by_gradients(
    gradient: popxl.Graph, dy: popxl.TensorByRef, x: popxl.TensorByRef, w: popxl.Tensor
) -> None:
    dx, dw = ops.call(gradient, dy, x, w)
    ops.add_(dy, dx)
    ops.add_(x, dw)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", ["loop", "branch"])
def test_looking_at_gradients_between_statements_changes_nothing(look, kind):
    """A body that gains outputs after the gradient of its loop, or of its branch, was looked at."""
    inputs = [f32(3, 3, seed=i) for i in range(2)]

    def build(x, w):
        ir = popxl.gir()
        body = ir.create_graph(lambda x, w: ops.sin(x) * ops.tanh(w), x, w)
        ran = {
            "loop": lambda x, w: ops.repeat(body, 2, x, w),
            "branch": lambda x, w: ops.conditional(
                popxl.constant(True), body, ir.create_graph(lambda x, w: x + w, x, w), [x, w],
                [x, w],
            ),
        }  # fmt: skip
        outer = ir.create_graph(ran[kind], x, w)
        site = ops.call_with_info(outer, x, w)
        info = autodiff(outer)
        if kind == "loop":
            autodiff(body, grads_required=body.inputs[:1])
        LOOKS[look](info, x)
        if kind == "loop":
            autodiff(body)
        else:
            with pytest.raises(SpecError, match="branch"):
                autodiff(body)
        dy = popxl.constant(np.ones((3, 3), np.float32))
        return ops.call(info.graph, dy, inputs_dict=info.inputs_dict(site))

    x, w = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in inputs)
    y = torch.sin(x) * torch.tanh(w)
    y = torch.sin(y) * torch.tanh(w) if kind == "loop" else y
    y.sum().backward()
    for a, b in zip(run(build, *inputs), (x.grad, w.grad), strict=True):
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-5, atol=1e-6)


# ---- a session's program is the one it was made of ----------------------------------------------
def test_a_program_that_is_written_on_needs_a_new_session():
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(np.zeros(2, np.float32))
        ops.add_(v, popxl.constant(1.0))
    before = popxl.Session(ir)
    with ir.main_graph:
        ops.add_(v, popxl.constant(10.0))
    after = popxl.Session(ir)
    for session, expected in ((before, 1), (after, 11), (before, 2)):
        with session:
            session.run()
        assert session.get_tensor_data(v).tolist() == [expected] * 2


def _late_op(ir, v, graph):
    ops.add_(v, popxl.constant(10.0))


def _late_store(ir, v, graph):
    ops.host_store(popxl.d2h_stream((2,), popxl.float32, "late"), v + 1.0)


def _late_op_of_a_called_graph(ir, v, graph):
    with graph:
        ops.add_(graph.inputs[0], popxl.constant(5.0))


def _late_call(ir, v, graph):
    ops.call(ir.create_graph(lambda t: t + 1.0, v), v)


@pytest.mark.parametrize("change", [_late_op, _late_store, _late_op_of_a_called_graph, _late_call])
def test_a_change_that_no_session_has_compiled_is_not_left_out_without_a_word(change):
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(np.zeros(2, np.float32))

        def inner(t: popxl.TensorByRef):
            ops.add_(t, popxl.constant(1.0))

        def outer(t: popxl.TensorByRef):
            ops.call(popxl.gir().create_graph(inner, t), t)

        graph = ir.create_graph(outer, v)
        ops.repeat(graph, 2, v)
    (called,) = graph.called_graphs
    with popxl.Session(ir) as before:
        before.run()
        ir.create_graph(inner, v)  # which nobody runs
        before.run()
        with ir.main_graph:
            change(ir, v, called)
        with pytest.raises(popart_exception, match=r"changed after .*: make a new session"):
            before.run()
        assert before.get_tensor_data(v).tolist() == [4, 4]
        popxl.Session(ir)
        before.run()
    assert before.get_tensor_data(v).tolist() == [6, 6]


def test_a_program_that_was_changed_is_not_compiled_again_unseen(monkeypatch):
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(np.zeros(2, np.float32))
        ops.add_(v, popxl.constant(1.0))
    session = popxl.Session(ir)
    session._epoch -= 1  # as if the devices had been started anew
    with session:
        session.run()
    with ir.main_graph:
        ops.add_(v, popxl.constant(10.0))
    session._epoch -= 1
    with pytest.raises(popart_exception, match="changed after this session was made"):
        session.__enter__()
    assert session.get_tensor_data(v).tolist() == [1, 1]


def test_what_is_known_of_ops_is_forgotten_some_time(monkeypatch, ir):
    monkeypatch.setattr(memo, "_MAX_ENTRIES", 3)
    monkeypatch.setattr(shape_inference, "_CACHE", {})
    x = popxl.variable(1.0)
    for size in range(1, 9):
        assert ops.reduction.broadcast_to(x, (size,)).shape == (size,)
    assert len(shape_inference._CACHE) <= 3
