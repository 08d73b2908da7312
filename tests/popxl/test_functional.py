"""Functionalization: references, views, in-place ops and carried values, in calls, loops and
branches, on devices and on the host."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.transforms import autodiff
from popxl.transforms.saveable import products_saveable, save_policy
from tests.popxl.programs import f32, run, store
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached", "compiled_quickly")
W = 4
ONES = np.ones(W, np.float32)
ROWS = np.arange(W, dtype=np.float32)
EXECUTION = pytest.mark.parametrize("offloaded", [False, True], ids=["device", "host"])


def row() -> popxl.Tensor:
    return popxl.constant(0, popxl.int32)


def touch(buffer: popxl.RemoteBuffer | None) -> None:
    """Move an entry, if there is a buffer: the host executes such graphs."""
    if buffer is not None:
        ops.remote_store(buffer, 1, ops.remote_load(buffer, 0) + 1.0)


def entries(offloaded: bool) -> popxl.RemoteBuffer | None:
    return popxl.remote_buffer((W,), popxl.float32, 2) if offloaded else None


# ---- branches that change parts of one owner ----------------------------------------------------
PARTS = {
    "overlapping": lambda v: ops.slice_(v, 1, 3),
    "reversed": lambda v: ops.slice_(v, 3, None, -1),
    "a view of a view": lambda v: ops.slice_(ops.slice_(v, 3, None, -1), 0, 2),
}


@EXECUTION
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("whole_first", [False, True])
def test_one_branch_changes_a_tensor_and_the_other_a_part_of_it(offloaded, part, whole_first):
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = entries(offloaded)
        v = popxl.variable(ROWS)
        view = PARTS[part](v)

        def change(x: popxl.TensorByRef):
            touch(buffer)
            ops.add_(x, popxl.constant(10.0))

        whole, partial = ir.create_graph(change, v), ir.create_graph(change, view)
        which = ops.host_load(stream := popxl.h2d_stream((), popxl.bool))
        branches = (whole, partial) if whole_first else (partial, whole)
        inputs = ([v], [view]) if whole_first else ([view], [v])
        ops.conditional(which, *branches, *inputs)
    expected = ROWS.copy()
    changed = {
        "overlapping": expected[1:3],
        "reversed": expected[::-1],
        "a view of a view": expected[::-1][:2],
    }[part]
    with popxl.Session(ir) as session:
        for taken in (False, True):
            session.run({stream: np.array(taken)})
            if taken is whole_first:
                expected += 10
            else:
                changed += 10
            np.testing.assert_array_equal(session.read_variable_data(v), expected)


@EXECUTION
def test_branches_change_parts_that_do_not_overlap(offloaded):
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = entries(offloaded)
        v = popxl.variable(ROWS)
        halves = [ops.slice_(v, 0, 2), ops.slice_(v, 2, 4)]

        def change(x: popxl.TensorByRef):
            touch(buffer)
            ops.add_(x, popxl.constant(10.0))

        graph = ir.create_graph(change, halves[0])
        which = ops.host_load(stream := popxl.h2d_stream((), popxl.bool))
        ops.conditional(which, graph, graph, halves[:1], halves[1:])
    with popxl.Session(ir) as session:
        for taken, change in ((False, [0, 0, 10, 10]), (True, [10, 10, 10, 10])):
            session.run({stream: np.array(taken)})
            np.testing.assert_array_equal(session.read_variable_data(v), ROWS + change)


# ---- references to parts of one owner -----------------------------------------------------------
@EXECUTION
@pytest.mark.parametrize("count", [0, 1, 3])
def test_references_to_disjoint_parts(offloaded, count):
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = entries(offloaded)
        v = popxl.variable(ROWS)
        even, odd = ops.slice_(v, step=2), ops.slice_(v, 3, None, -2)

        def change(x: popxl.TensorByRef, y: popxl.TensorByRef):
            touch(buffer)
            ops.add_(x, y)
            ops.add_(y, popxl.constant(1.0))

        ops.repeat(ir.create_graph(change, even, odd), count, even, odd)
    expected = ROWS.copy()
    for _ in range(count):
        expected[::2] += expected[3::-2]
        expected[3::-2] += 1
    with popxl.Session(ir) as session:
        session.run()
        np.testing.assert_array_equal(session.read_variable_data(v), expected)


def test_references_that_overlap_are_refused():
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(ROWS)

        def change(x: popxl.TensorByRef, y: popxl.TensorByRef):
            ops.add_(x, y)

        first, second = ops.slice_(v, 0, 3), ops.slice_(v, 3, 0, -1)
        graph = ir.create_graph(change, first, second)
        with pytest.raises(ValueError, match="two references, 'x' and 'y'"):
            ops.call(graph, first, second)


# ---- donated memory -----------------------------------------------------------------------------
@pytest.mark.optimised
def test_a_call_that_returns_its_input_and_a_change_of_it_afterwards():
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = entries(True)
        v = popxl.variable(ROWS)

        def same(x):
            touch(buffer)
            return x

        (kept,) = ops.call(ir.create_graph(same, v), v)
        ops.add_(v, popxl.constant(1.0))
        (again,) = ops.call(ir.create_graph(same, v), v)
        ops.remote_store(buffer, 0, kept)
        ops.add_(v, popxl.constant(1.0))
        outs = store(kept), store(again), store(ops.remote_load(buffer, 0))
    with popxl.Session(ir) as session:
        for run in range(3):
            found = session.run()
            start = ROWS + 2 * run
            for out, expected in zip(outs, (start, start + 1, start), strict=True):
                np.testing.assert_array_equal(found[out], expected)


@pytest.mark.optimised
def test_a_branch_on_the_host_that_is_not_taken_gives_nothing_away():
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = entries(True)
        v = popxl.variable(ROWS)

        def changing(x: popxl.TensorByRef):
            touch(buffer)
            ops.add_(x, popxl.constant(1.0))
            return x * 2.0

        def other(x):
            touch(buffer)
            return x

        graphs = ir.create_graph(changing, v), ir.create_graph(other, v)
        before = v * 1.0
        which = ops.host_load(stream := popxl.h2d_stream((), popxl.bool))
        (y,) = ops.conditional(which, *graphs, [v], [v])
        ops.add_(v, y)
        ops.add_(y, before)
        out = store(y)
    with popxl.Session(ir) as session:
        value = ROWS.copy()
        for taken in (False, False, True, True, False):
            found = session.run({stream: np.array(taken)})[out]
            start = value.copy()
            value = value + 1 if taken else value
            y = value * 2 if taken else value
            value = value + y
            np.testing.assert_array_equal(found, y + start)
            np.testing.assert_array_equal(session.read_variable_data(v), value)


@EXECUTION
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_loop_with_a_reference_runs_again(offloaded, count):
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = entries(offloaded)
        v, w = popxl.variable(ROWS), popxl.variable(ROWS)

        def change(y, x: popxl.TensorByRef, z: popxl.TensorByRef):
            touch(buffer)
            ops.add_(x, z)
            return z

        (y,) = ops.repeat(ir.create_graph(change, v, v, w), count, v * 2.0, v, w)
        ops.add_(w, popxl.constant(1.0))
        out = store(y)
    with popxl.Session(ir) as session:
        value, other = ROWS.copy(), ROWS.copy()
        for _ in range(3):
            expected = other if count else value * 2
            value = value + count * other
            np.testing.assert_array_equal(session.run()[out], expected)
            other = other + 1
        np.testing.assert_array_equal(session.read_variable_data(v), value)
        np.testing.assert_array_equal(session.read_variable_data(w), other)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("swapped", [False, True])
def test_references_that_a_loop_carries_change_places(count, swapped):
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = entries(True)
        v, w = popxl.variable(ROWS), popxl.variable(ROWS + 10)

        def body(x: popxl.TensorByRef, y: popxl.TensorByRef):
            touch(buffer)
            ops.add_(x, popxl.constant(1.0))
            ops.add_(y, popxl.constant(2.0))
            return (y, x) if swapped else (x, y)

        ops.repeat(ir.create_graph(body, v, w), count, v, w)
    with popxl.Session(ir) as session:
        a, b = ROWS, ROWS + 10
        for _ in range(2):
            session.run()
            for _ in range(count):
                a, b = a + 1, b + 2
                a, b = (b, a) if swapped else (a, b)
            np.testing.assert_array_equal(session.read_variable_data(v), a)
            np.testing.assert_array_equal(session.read_variable_data(w), b)


# ---- long chains --------------------------------------------------------------------------------
LONG = 1200


def test_chains_of_changes_and_views_may_be_long():
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(np.zeros(2, np.float32))
        one = popxl.constant(np.array([1, 0], np.float32))
        t: popxl.Tensor = v
        for _ in range(LONG):
            t += one
        view: popxl.Tensor = v
        for _ in range(LONG):
            view = ops.slice_(view, 1, None, -1)
        ops.add_(view, one)
        out = store(view)
    assert str(ir.main_graph)
    assert str(ir.main_graph.functional)
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run()[out], [LONG + 1, 0])


def test_views_of_views_may_be_many():
    ir = popxl.Ir()
    with ir.main_graph:
        view: popxl.Tensor = popxl.variable(np.zeros(2, np.float32))
        for _ in range(LONG):
            view = ops.slice_(view, 1, None, -1)
        ops.add_(view, popxl.constant(1.0))
    kinds = [node.kind for node in ir.main_graph.functional.nodes]
    assert kinds[0] == "view"
    assert kinds[-1] == "write"
    assert len(kinds) < 64  # XLA's own recursion ends at some hundreds


@pytest.mark.parametrize("count", [16, slow(17), 50])
def test_views_of_views_show_parts_of_several_owners(count):
    """Slices, reshapes, transposes and joints in turn, read and written; some of an owner only."""
    data = [f32(3, 4, seed=1), f32(3, 4, seed=2)]

    def build(a, b):
        a, b = ops.identity(a), ops.identity(b)
        v = ops.concat_([a, b], 0)
        for i in range(count):
            if i % 3 == 0:
                v = ops.slice_(v, v.shape[0] - 1, None, -1)
            elif i % 3 == 1:
                v = ops.reshape_(v, (v.shape[1], v.shape[0]))
            else:
                v = ops.transpose_(v)
        row = ops.slice_(v, 1, 3)
        ops.scaled_add_(row, row, b=2.0)
        return a, b, v

    expected = np.concatenate(data)
    v = np.arange(24).reshape(6, 4)
    for i in range(count):
        v = [lambda v: v[::-1], lambda v: v.reshape(v.shape[::-1]), lambda v: v.T][i % 3](v)
    flat = expected.reshape(-1)
    flat[v[1:3]] *= 3
    found = run(build, *data)
    for ours, theirs in zip(found, [expected[:3], expected[3:], flat[v]], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_gradients_of_long_chains():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.float32(0.5))

        def chain(x):
            for _ in range(LONG):
                x = x * 1.001
            return x * x

        with save_policy(products_saveable):
            info = autodiff(ir.create_graph(chain, x))
    assert len(info.inputs) == 2


# ---- what is printed ----------------------------------------------------------------------------
def test_the_schedule_shows_what_branches_change():
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = entries(True)
        v = popxl.variable(ROWS)

        def change(x: popxl.TensorByRef):
            touch(buffer)
            ops.add_(x, popxl.constant(10.0))

        graph = ir.create_graph(change, v)
        nothing = ir.create_graph(lambda: touch(buffer))
        which = ops.host_load(stream := popxl.h2d_stream((), popxl.bool))
        ops.conditional(which, graph, nothing, [v])
    session = popxl.Session(ir)
    (line,) = [x for x in str(session.schedule).splitlines() if " if " in x]
    assert line.strip().startswith("%")
    assert "(%0)" in line
    with session:
        session.run({stream: np.array(True)})
        np.testing.assert_array_equal(session.read_variable_data(v), ROWS + 10)
