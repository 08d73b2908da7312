"""Loops: what is carried, what stays, what is changed by reference, and state inside."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from tests.popxl.compiled import optimised
from tests.popxl.programs import f32, graph_of, run, run_ir, store

pytestmark = pytest.mark.usefixtures("compiled_quickly")

X, Y = f32(3), f32(3, seed=1)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_first_inputs_are_carried_and_the_others_stay(count):
    def build(x, y):
        return ops.repeat(graph_of(lambda a, b: a * 0.5 + b, x, y), count, x, y)

    expected = X.copy()
    for _ in range(count):
        expected = expected * 0.5 + Y
    np.testing.assert_allclose(run(build, X, Y)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_several_carried_values_change_places(count):
    def build(x, y):
        return ops.repeat(graph_of(lambda a, b: (b, a + b), x, y), count, x, y)

    a, b = X, Y
    for _ in range(count):
        a, b = b, a + b
    for found, expected in zip(run(build, X, Y), (a, b), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_references_keep_their_changes_between_iterations(count):
    def step(a, total: popxl.TensorByRef, unchanged: popxl.TensorByRef):
        total += a
        return a * 2 + unchanged

    def build(x, y):
        total, unchanged = ops.identity(y), ops.identity(y)
        out = ops.repeat(graph_of(step, x, y, y), count, x, total, unchanged)
        return *out, total * 1.0, unchanged * 1.0

    a, total = X.copy(), Y.copy()
    for _ in range(count):
        total, a = total + a, a * 2 + Y
    for found, expected in zip(run(build, X, Y), (a, total, Y), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_invariant_changed_in_the_graph_starts_anew_each_time():
    def step(a, b):
        b += 1.0
        return a + b

    def build(x, y):
        y = ops.identity(y)
        return *ops.repeat(graph_of(step, x, y), 3, x, y), y * 1.0

    total, y = run(build, X, Y)
    np.testing.assert_allclose(total, X + 3 * (Y + 1), rtol=1e-5)
    np.testing.assert_array_equal(y, Y)


def test_a_marked_invariant_keeps_its_changes():
    def step(a, b):
        b += 1.0
        return a + b

    def build(x, y):
        y = ops.identity(y)
        info = ops.repeat_with_info(graph_of(step, x, y), 3, x, y)
        info.set_parent_input_modified(y)
        return *info.outputs, y * 1.0

    total, y = run(build, X, Y)
    np.testing.assert_allclose(total, X + 3 * Y + 6, rtol=1e-5)
    np.testing.assert_allclose(y, Y + 3, rtol=1e-6)


def test_loops_nest():
    def build(x, y):
        inner = graph_of(lambda a, b: a * 0.5 + b, x, y)

        def outer(a, b, count: popxl.TensorByRef):
            count += 1.0
            return ops.repeat(inner, 3, a, b)

        count = ops.init((), popxl.float32)
        return *ops.repeat(graph_of(outer, x, y, count), 4, x, y, count), count * 1.0

    expected = X.copy()
    for _ in range(12):
        expected = expected * 0.5 + Y
    found, count = run(build, X, Y)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert count == 4


def test_streams_inside_a_loop_take_successive_transfers():
    ir = popxl.Ir()
    ir.num_host_transfers = 6
    with ir.main_graph:
        source = popxl.h2d_stream((2,), popxl.float32)
        target = popxl.d2h_stream((2,), popxl.float32)
        total = popxl.variable(np.zeros(2, np.float32))

        def step(total: popxl.TensorByRef):
            first, second = ops.host_load(source), ops.host_load(source)
            total += first
            ops.host_store(target, second * 10 + total)
            ops.host_store(target, first)

        def outer(total: popxl.TensorByRef):
            ops.repeat(graph, 1, total)

        graph = ir.create_graph(step, total)
        ops.repeat(graph, 2, total)
        ops.call(ir.create_graph(outer, total), total)
    data = f32(6, 2)
    with popxl.Session(ir) as session:
        found = session.run({source: data})[target]
    sums = np.cumsum(data[::2], axis=0)
    np.testing.assert_allclose(found[::2], data[1::2] * 10 + sums, rtol=1e-5)
    np.testing.assert_array_equal(found[1::2], data[::2])


@pytest.mark.parametrize("count", [1, 3])
def test_remote_buffers_inside_loops_keep_what_is_stored(count):
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((3,), popxl.float32, 3)
        entries = [popxl.remote_variable(X + i, buffer, i) for i in range(3)]
        row = popxl.variable(0, popxl.uint32)

        def step(row: popxl.TensorByRef):
            ops.remote_store(buffer, row, ops.remote_load(buffer, row) * 2)
            ops.increment_mod_(row, 1, 3)

        ops.repeat(ir.create_graph(step, row), count, row)
        store(ops.remote_load(buffer, 0))
    with popxl.Session(ir) as session:
        (first,) = session.run().values()
        found = session.get_tensors_data(entries)
    np.testing.assert_allclose(first, X * 2, rtol=1e-6)
    for i, entry in enumerate(entries):
        expected = (X + i) * (2 if i < count else 1)
        np.testing.assert_allclose(found[entry], expected, rtol=1e-6)


def test_a_variable_can_be_carried(ir):
    v = popxl.variable(X)
    out = ops.repeat(ir.create_graph(lambda a: a * 2, v), 3, v)
    found = run_ir(ir, [store(out[0]), store(v)])
    np.testing.assert_allclose(found[0], X * 8, rtol=1e-6)
    np.testing.assert_array_equal(found[1], X)


# ---- errors -------------------------------------------------------------------------------------
def test_wrong_loops_are_errors(ir):
    x, wide = popxl.variable(X, name="x"), popxl.variable(np.ones(4, np.float32))
    with pytest.raises(ValueError, match="repeat_count must be at least 0, not -1"):
        ops.repeat(ir.create_graph(lambda a: a, x), -1, x)
    with pytest.raises(ValueError, match="2 outputs but only 1 inputs"):
        ops.repeat(ir.create_graph(lambda a: (a, a), x), 2, x)
    with pytest.raises(ValueError, match=r"is float32\[4\], but the input it is carried to, 'a'"):
        ops.repeat(ir.create_graph(lambda a, b: b, x, wide), 2, x, wide)
    with pytest.raises(ValueError, match="lacks values"):
        ops.repeat(ir.create_graph(lambda a: a, x), 2)


@pytest.mark.optimised
def test_the_loop_is_not_unrolled(ir):
    x = popxl.variable(X)
    store(ops.repeat(ir.create_graph(lambda a: ops.sin(a), x), 1000, x)[0])
    text = optimised(popxl.Session(ir))
    assert text.count("sine(") < 10
    assert "while(" in text


def test_a_fraction_of_an_iteration_is_refused():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(1.0)
        with pytest.raises(TypeError, match="must be an integer, not 1.5"):
            ops.repeat(ir.create_graph(lambda t: t + 1, x), 1.5, x)


def test_a_carried_reference_holds_what_is_carried(ir):
    """A call, which carries nothing, leaves the reference as the graph has changed it."""

    def body(x: popxl.TensorByRef) -> popxl.Tensor:
        ops.add_(x, popxl.constant(1.0))
        return x * 10.0

    v = [popxl.variable(np.full(2, 3, np.float32)) for _ in range(4)]
    graph = ir.create_graph(body, v[0])
    ops.call(graph, v[0])
    for count in range(3):
        ops.repeat(graph, count, v[1 + count])
    with popxl.Session(ir) as session:
        session.run()
    left = [session.get_tensor_data(each)[0] for each in v]
    assert left == [4, 3, 40, 410]
