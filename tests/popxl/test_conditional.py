"""Conditionals: both branches, references, state in branches."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from tests.popxl.programs import f32, graph_of, run

pytestmark = pytest.mark.usefixtures("cached", "compiled_quickly")
X, Y = f32(3), f32(3, seed=1)
BOTH = pytest.mark.parametrize("taken", [True, False])


@BOTH
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_the_condition_chooses_the_branch(taken, shape):
    def build(cond, x, y):
        then = graph_of(lambda a: (a * 2, a), x)
        otherwise = graph_of(lambda a, b: (a + b, b), x, y)
        return ops.conditional(cond, then, otherwise, [x], [x, y])

    found = run(build, np.full(shape, taken), X, Y)
    expected = (X * 2, X) if taken else (X + Y, Y)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@BOTH
def test_inputs_can_be_given_by_tensor(taken):
    def build(cond, x, y):
        then, otherwise = graph_of(lambda a, b: a - b, x, y), graph_of(lambda a: a, x)
        return ops.conditional(
            cond, then, otherwise, [x],
            then_inputs_dict={then.inputs[1]: y}, else_inputs_dict={otherwise.inputs[0]: y},
        )  # fmt: skip

    (found,) = run(build, np.array(taken), X, Y)
    np.testing.assert_allclose(found, X - Y if taken else Y, rtol=1e-6)


def _adds(to: popxl.TensorByRef, by):
    to += by


def _doubles(what: popxl.TensorByRef):
    what += what


@BOTH
def test_references_are_changed_by_the_branch_that_runs(taken):
    def build(cond, x, y):
        a, b = ops.identity(x), ops.identity(y)
        ops.conditional(cond, graph_of(_adds, a, b), graph_of(_doubles, b), [a, b], [b])
        return a * 1.0, b * 1.0

    a, b = run(build, np.array(taken), X, Y)
    np.testing.assert_allclose(a, X + Y if taken else X, rtol=1e-6)
    np.testing.assert_allclose(b, Y if taken else Y + Y, rtol=1e-6)


@BOTH
def test_both_branches_may_change_one_tensor(taken):
    def build(cond, x, y):
        a = ops.identity(x)
        ops.conditional(cond, graph_of(_adds, a, y), graph_of(_doubles, a), [a, y], [a])
        return a * 1.0

    (a,) = run(build, np.array(taken), X, Y)
    np.testing.assert_allclose(a, X + Y if taken else X + X, rtol=1e-6)


@BOTH
def test_values_stay_as_they_are(taken):
    def changes(a):
        a += 1.0
        return a

    def build(cond, x):
        x = ops.identity(x)
        graph = graph_of(changes, x)
        return *ops.conditional(cond, graph, graph, [x], [x]), x * 1.0

    out, x = run(build, np.array(taken), X)
    np.testing.assert_allclose(out, X + 1, rtol=1e-6)
    np.testing.assert_array_equal(x, X)


@BOTH
def test_branches_use_streams_and_remote_buffers(taken):
    ir = popxl.Ir()
    ir.num_host_transfers = 2
    with ir.main_graph:
        cond = popxl.variable(taken)
        source = popxl.h2d_stream((3,), popxl.float32)
        target = popxl.d2h_stream((3,), popxl.float32)
        buffer = popxl.remote_buffer((3,), popxl.float32, 2)
        entries = [popxl.remote_variable(np.zeros(3, np.float32), buffer, i) for i in range(2)]

        def then():
            x = ops.host_load(source)
            ops.remote_store(buffer, 0, x)
            ops.host_store(target, x * 2)

        def otherwise():
            ops.remote_store(buffer, 1, ops.remote_load(buffer, 1) + 5.0)

        ops.conditional(cond, ir.create_graph(then), ir.create_graph(otherwise))
        ops.host_store(target, ops.host_load(source))
    data = f32(2, 3)
    with popxl.Session(ir) as session:
        found = session.run({source: data})[target]
        first, second = session.get_tensors_data(entries).values()
    zero = np.zeros(3)
    expected = [data[0] * 2, data[1]] if taken else [data[0], zero]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(first, data[0] if taken else zero)
    np.testing.assert_array_equal(second, zero if taken else zero + 5)


def test_a_conditional_inside_a_loop_chooses_anew_each_time():
    def build(x):
        def step(a, n: popxl.TensorByRef):
            even = ops.equal(n % 2, popxl.constant(0, popxl.int32))
            graphs = graph_of(lambda v: v * 2, a), graph_of(lambda v: v + 1, a)
            (a,) = ops.conditional(even, *graphs, [a], [a])
            n += 1
            return a

        n = ops.init((), popxl.int32)
        return ops.repeat(graph_of(step, x, n), 4, x, n)

    np.testing.assert_allclose(run(build, X)[0], (X * 2 + 1) * 2 + 1, rtol=1e-6)


def test_replicas_may_choose_differently():
    def build(cond, x):
        graphs = graph_of(lambda v: v * 2, x), graph_of(lambda v: v + 1, x)
        return ops.conditional(cond, *graphs, [x], [x])

    cond, x = np.arange(8) % 2 == 0, f32(8, 3)
    (found,) = run(build, cond, x, replicas=8)
    np.testing.assert_allclose(found, np.where(cond[:, None], x * 2, x + 1), rtol=1e-6)


# ---- call sites and errors ----------------------------------------------------------------------
def test_sites_translate_for_both_branches(ir):
    cond, a, b = popxl.variable(True), popxl.variable(X), popxl.variable(Y)
    then = ir.create_graph(lambda p: p * 2, a)
    otherwise = ir.create_graph(lambda p, q: p + q, a, b)
    info = ops.conditional_with_info(cond, then, otherwise, [a], [a, b])
    assert info.called_graph == (then, otherwise)
    assert info.inputs == (cond, a, a, b)
    assert info.graph_to_parent_input_index(0, True) == 1
    assert info.graph_to_parent_input_index(1, False) == 3
    assert info.parent_to_graph_input_index(3) == 1
    assert info.is_parent_index_in_then_branch(1)
    assert not info.is_parent_index_in_then_branch(2)
    with pytest.raises(ValueError, match="condition"):
        info.is_parent_index_in_then_branch(0)
    assert info.graph_to_parent(otherwise.inputs[1]) is b
    assert info.graph_to_parent(then.outputs[0]) is info.outputs[0]
    assert info.parent_to_graph(b) is otherwise.inputs[1]
    with pytest.raises(IndexError):
        info.graph_to_parent_output_index(1)


def test_branches_that_do_not_fit_are_errors(ir):
    cond, a = popxl.variable(True), popxl.variable(X)
    one, two = ir.create_graph(lambda p: p, a), ir.create_graph(lambda p: (p, p), a)
    with pytest.raises(ValueError, match="branches must return the same"):
        ops.conditional(cond, one, two, [a], [a])
    with pytest.raises(ValueError, match="lacks values"):
        ops.conditional(cond, one, one, [a], [])


def test_a_condition_must_be_one_bool(ir):
    a = popxl.variable(X)
    graph = ir.create_graph(lambda p: p, a)
    for wrong in (popxl.variable([True, False]), popxl.variable(1.0)):
        with pytest.raises(ValueError, match="condition"):
            ops.conditional(wrong, graph, graph, [a], [a])


@BOTH
def test_a_marked_input_keeps_the_change_of_either_branch(taken):
    def changes(a):
        a += 1.0

    def build(cond, x):
        x = ops.identity(x)
        graph = graph_of(changes, x)
        info = ops.conditional_with_info(cond, graph, graph, [x], [x])
        info.set_parent_input_modified(x)
        return x * 1.0

    np.testing.assert_allclose(run(build, np.array(taken), X)[0], X + 1, rtol=1e-6)


def test_branches_may_return_nothing():
    def build(cond, x):
        graph = graph_of(lambda: None)
        assert ops.conditional(cond, graph, graph) == ()
        return x

    np.testing.assert_array_equal(run(build, np.array(True), X)[0], X)
