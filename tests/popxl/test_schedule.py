"""Schedules: the host's steps in order, and right values for any split into segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import popart
import popxl
from popxl import ops
from popxl._run import program as program_module
from popxl._schedule.schedule import Branch, Fetch, Load, Loop, Run, Step, Store
from popxl._schedule.schedule_builder import _MAX_LOADED_BYTES
from popxl.transforms import autodiff, outline
from tests.popxl.compiled import executables
from tests.popxl.programs import f32, store

pytestmark = pytest.mark.usefixtures("cached")
W = 4


def entries(values: np.ndarray) -> tuple[popxl.RemoteBuffer, list[popxl.Variable]]:
    """A buffer with the rows of `values`."""
    buffer = popxl.remote_buffer(values.shape[1:], popxl.float32, len(values))
    return buffer, [popxl.remote_variable(v, buffer, i) for i, v in enumerate(values)]


def number(value: int = 0) -> popxl.Tensor:
    return popxl.constant(value, popxl.int32)


def steps(session: popxl.Session) -> Iterator[Step]:
    """All steps of all routines."""
    for routine in session.schedule.routines:
        yield from routine.steps


def kinds(session: popxl.Session) -> list[str]:
    """The steps of the main routine by name."""
    return [type(step).__name__ for step in session.schedule.main.steps]


def started(build: Callable[..., Any], replicas: int = 1) -> tuple[popxl.Session, Any]:
    """A session of a main graph, and what `build(ir)` returned."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        found = build(ir)
    return popxl.Session(ir), found


# ---- the steps ----------------------------------------------------------------------------------
LAYERS = 3


def phased(ir: popxl.Ir) -> tuple[popxl.HostToDeviceStream, popxl.DeviceToHostStream]:
    """Forward through layers whose weights and activations are in remote buffers."""
    weights, _ = entries(f32(LAYERS, W))
    activations = popxl.remote_buffer((W,), popxl.float32, LAYERS + 1)
    given = popxl.h2d_stream((W,), popxl.float32, "x")
    ops.remote_store(activations, 0, ops.host_load(given) * 2.0)

    def layer(row):
        h = ops.tanh(ops.remote_load(activations, row) * ops.remote_load(weights, row))
        ops.remote_store(activations, row + 1, h)
        return row + 1

    ops.repeat(ir.create_graph(layer, number()), LAYERS, number())
    return given, store(ops.remote_load(activations, LAYERS))


PHASED = """\
routine main:
  %1 = run main.0()
  store %1 in buffer 2[0]; free %1
  %2 = 3 times phased.layer_subgraph(0)(%0); free %2
  %4 = load buffer 2[3]
  run main.1(%4); free %4

routine phased.layer_subgraph(0):
  %1 = load buffer 2[%0]
  %2 = load buffer 1[%0]
  %4 = add(%0, 1) on the host
  %6 = add(%0, 1) on the host; free %0
  %5 = run phased.layer_subgraph(0).0(%1, %2); free %1, %2
  store %5 in buffer 2[%4]; free %5, %4"""


def test_the_schedule_of_a_phased_program_as_text():
    session, (given, out) = started(phased)
    assert str(session.schedule) == PHASED
    x = expected = f32(W, seed=1)
    expected = expected * 2
    for w in f32(LAYERS, W):
        expected = np.tanh(expected * w)
    with session:
        np.testing.assert_allclose(session.run({given: x})[out], expected, rtol=1e-5)


def test_loads_go_before_the_segment_that_needs_them_and_stores_after_it():
    def build(ir):
        buffer, _ = entries(f32(3, W))
        for i in range(3):
            ops.remote_store(buffer, i, ops.remote_load(buffer, i) * 2.0 + 1.0)

    session, _ = started(build)
    assert kinds(session) == ["Load", "Run", "Store"] * 3

    def independent(ir):
        (a, _), (b, _) = entries(f32(3, W)), entries(f32(3, W))
        for i in range(3):
            ops.remote_store(b, i, ops.remote_load(a, i) * 2.0)

    session, _ = started(independent)
    assert kinds(session) == [*["Load"] * 3, "Run", *["Store"] * 3]


def test_a_segment_is_cut_where_many_bytes_were_loaded_for_it():
    def build(ir):
        rows = _MAX_LOADED_BYTES // 4 // 4  # 4 entries fill a segment
        buffer = popxl.remote_buffer((rows,), popxl.float32, 10)
        total = popxl.variable(np.zeros(rows, np.float32))
        for i in range(10):
            ops.add_(total, ops.remote_load(buffer, i))

    session, _ = started(build)
    runs = [s for s in session.schedule.main.steps if isinstance(s, Run)]
    assert 2 <= len(runs) <= 4
    loads = 0
    for step in session.schedule.main.steps:
        loads = loads + 1 if isinstance(step, Load) else 0
        assert loads <= 5


def test_a_program_without_transfers_is_one_segment():
    def build(ir):
        x = popxl.variable(f32(W))
        graph = ir.create_graph(lambda x: ops.tanh(x), x)
        return store(ops.repeat(graph, 3, ops.call(graph, x)[0])[0])

    session, _ = started(build)
    assert kinds(session) == ["Run"]


# ---- offsets ------------------------------------------------------------------------------------
def test_offsets_from_counters_are_numbers_of_the_host():
    def build(ir):
        buffer, variables = entries(f32(8, W))

        def body(row, other):
            at = (row * 2 + 1) % 8
            ops.remote_store(buffer, at, ops.remote_load(buffer, at) + 1.0)
            return row + 1, other + 3

        ops.repeat(ir.create_graph(body, number(), number()), 4, number(), number())
        return variables

    session, variables = started(build)
    assert not any(isinstance(step, Fetch) for step in steps(session))
    with session:
        session.run()
        for i, v in enumerate(variables):
            np.testing.assert_array_equal(session.read_variable_data(v), f32(8, W)[i] + i % 2)


def test_an_offset_that_only_the_device_knows_is_fetched():
    def build(ir):
        buffer, variables = entries(f32(4, W))
        at = popxl.variable(1, popxl.int32)
        ops.remote_store(buffer, at, popxl.constant(np.ones(W, np.float32)))
        ops.add_(at, number(1))
        return at, store(ops.remote_load(buffer, at)), variables

    session, (at, out, variables) = started(build)
    assert sum(isinstance(step, Fetch) for step in steps(session)) == 2
    with session:
        for run in range(2):
            np.testing.assert_array_equal(session.run()[out], f32(4, W)[2 + run])
        assert session.read_variable_data(at) == 3
        found = [session.read_variable_data(v) for v in variables]
    np.testing.assert_array_equal(found[1:3], np.ones((2, W)))
    np.testing.assert_array_equal(found[::3], f32(4, W)[::3])


def test_an_offset_from_a_stream_in_a_loop():
    def build(ir):
        ir.num_host_transfers = 3
        buffer, _ = entries(f32(4, W))
        rows = popxl.h2d_stream((), popxl.int32)
        out = popxl.d2h_stream((W,), popxl.float32)

        def body():
            ops.host_store(out, ops.remote_load(buffer, ops.host_load(rows)))

        ops.repeat(ir.create_graph(body), 3)
        return rows, out

    session, (rows, out) = started(build)
    with session:
        found = session.run({rows: np.array([3, 0, 2], np.int32)})[out]
    np.testing.assert_array_equal(found, f32(4, W)[[3, 0, 2]])


def test_an_offset_outside_the_buffer_is_named():
    def build(ir):
        buffer, _ = entries(f32(4, W))
        rows = popxl.h2d_stream((), popxl.int32)
        return rows, store(ops.remote_load(buffer, ops.host_load(rows)))

    session, (rows, _) = started(build)
    with session, pytest.raises(IndexError, match=r"entry 4 of .*, which has 4 entries"):
        session.run({rows: np.int32(4)})


def test_replicas_may_use_different_entries():
    replicas = 4
    start = f32(4, W)

    def build(ir):
        buffer, _ = entries(start)
        rows, to = (popxl.h2d_stream((), popxl.int32, name) for name in ("rows", "to"))
        x = ops.remote_load(buffer, ops.host_load(rows))
        ops.remote_store(buffer, ops.host_load(to), x + 1.0)
        every = [store(ops.remote_load(buffer, i)) for i in range(4)]
        return rows, to, store(x), every

    session, (rows, to, out, every) = started(build, replicas)
    reads, writes = np.array([2, 0, 2, 1], np.int32), np.array([3, 1, 0, 3], np.int32)
    expected = np.broadcast_to(start[:, None], (4, replicas, W)).copy()
    loaded = start[reads]
    for r in range(replicas):
        expected[writes[r], r] = loaded[r] + 1
    with session:
        found = session.run({rows: reads, to: writes})
    np.testing.assert_array_equal(found[out], loaded)
    np.testing.assert_array_equal([found[s] for s in every], expected)


# ---- branches, loops, views ---------------------------------------------------------------------
@pytest.mark.parametrize("known", [False, True], ids=["on the device", "on the host"])
@pytest.mark.parametrize("taken", [False, True])
def test_conditionals_of_the_host(taken, known):
    def build(ir):
        buffer, variables = entries(f32(2, W))
        v = popxl.variable(np.ones(W, np.float32))
        stream = popxl.h2d_stream((), popxl.bool)
        which = popxl.constant(taken) if known else ops.host_load(stream)

        def no(v: popxl.TensorByRef):
            ops.remote_store(buffer, 0, v * 3.0)
            ops.add_(v, popxl.constant(1.0))
            return v * 1.0

        yes = ir.create_graph(lambda v: ops.remote_load(buffer, 1) + v, v)
        (y,) = ops.conditional(which, yes, ir.create_graph(no, v), [v], [v])
        return ({} if known else {stream: np.array(taken)}), store(y), v, variables

    session, (inputs, out, v, variables) = started(build)
    assert any(isinstance(step, Branch) for step in steps(session))
    assert any(isinstance(step, Fetch) for step in steps(session)) is not known
    with session:
        found = session.run(inputs)[out]
        value, first = session.read_variable_data(v), session.read_variable_data(variables[0])
    start = f32(2, W)
    np.testing.assert_allclose(found, start[1] + 1 if taken else np.full(W, 2.0), rtol=1e-6)
    np.testing.assert_array_equal(value, np.full(W, 1.0 if taken else 2.0))
    np.testing.assert_array_equal(first, start[0] if taken else np.full(W, 3.0))


def test_a_condition_that_differs_between_replicas_is_refused():
    def build(ir):
        buffer, _ = entries(f32(2, W))
        stream = popxl.h2d_stream((), popxl.bool)
        yes, no = (ir.create_graph(lambda i=i: ops.remote_load(buffer, i)) for i in range(2))
        return stream, store(ops.conditional(ops.host_load(stream), yes, no)[0])

    session, (stream, _) = started(build, 2)
    with session, pytest.raises(popart.popart_exception, match="must be the same on all of them"):
        session.run({stream: np.array([True, False])})


def test_nested_loops_with_accumulators_by_reference():
    """repeat(layers) { load weight; zero; repeat(steps) { load, accumulate, store }; store }."""
    weight, rows = f32(2, W), f32(6, W, seed=1)

    def build(ir):
        (weights, w_vars), (grads, g_vars) = entries(weight), entries(np.zeros_like(weight))
        activations, a_vars = entries(rows)

        def inner(at, w, total: popxl.TensorByRef):
            x = ops.remote_load(activations, at)
            total += x * w
            ops.remote_store(activations, at, x + 1.0)
            return at + 1

        def outer(layer, at):
            w = ops.remote_load(weights, layer)
            total = w * 0.0
            (at,) = ops.repeat(ir.create_graph(inner, at, w, total), 3, at, w, total)
            ops.remote_store(grads, layer, total)
            ops.remote_store(weights, layer, w * 2.0)
            return layer + 1, at

        ops.repeat(ir.create_graph(outer, number(), number()), 2, number(), number())
        return w_vars, g_vars, a_vars

    session, (w_vars, g_vars, a_vars) = started(build)
    with session:
        for run in range(2):
            session.run()
            grads = [session.read_variable_data(v) for v in g_vars]
            expected = (rows + run).reshape(2, 3, W).sum(1) * weight * 2**run
            np.testing.assert_allclose(grads, expected, rtol=1e-5)
        for v, w in zip(w_vars, weight, strict=True):
            np.testing.assert_array_equal(session.read_variable_data(v), w * 4)
        for v, x in zip(a_vars, rows, strict=True):
            np.testing.assert_allclose(session.read_variable_data(v), x + 2, rtol=1e-6)


def test_a_loop_of_no_iterations_changes_nothing():
    def build(ir):
        buffer, variables = entries(f32(2, W))
        x = popxl.variable(np.ones(W, np.float32))

        def body(x, row, v: popxl.TensorByRef):
            y = ops.remote_load(buffer, row) + x
            ops.remote_store(buffer, row, y)
            v += y
            return y, row + 1

        y, _ = ops.repeat(ir.create_graph(body, x, number(), x), 0, x, number(), x)
        ops.add_(y, popxl.constant(5.0))
        return store(y), x, variables

    session, (out, x, variables) = started(build)
    assert not any(isinstance(step, (Loop, Load, Store)) for step in steps(session))
    with session:
        np.testing.assert_array_equal(session.run()[out], np.full(W, 6))
        np.testing.assert_array_equal(session.read_variable_data(x), np.ones(W))
        np.testing.assert_array_equal(session.read_variable_data(variables[0]), f32(2, W)[0])


def test_loads_into_views():
    def build(ir):
        buffer, _ = entries(f32(3, W))
        v = popxl.variable(np.zeros((3, W), np.float32))
        ops.add_(v, popxl.constant(1.0))
        before = store(v)
        ops.remote_load_(buffer, 2, ops.slice_(v, 1, 2).reshape_((W,)))
        ops.add_(v, popxl.constant(10.0))
        ops.remote_load_(buffer, 0, ops.slice_(v, 0, 1).reshape_((W,)))
        return before, store(v), v

    session, (before, after, v) = started(build)
    rows, expected = f32(3, W), np.zeros((3, W), np.float32)
    with session:
        for _ in range(2):
            found = session.run()
            expected += 1
            np.testing.assert_array_equal(found[before], expected)
            expected[1] = rows[2]
            expected += 10
            expected[0] = rows[0]
            np.testing.assert_array_equal(found[after], expected)
            np.testing.assert_array_equal(session.read_variable_data(v), expected)


def test_a_loop_that_changes_an_input_by_value_starts_each_iteration_with_the_same():
    def build(ir):
        buffer, _ = entries(f32(3, W))
        v = popxl.variable(np.ones(W, np.float32))

        def body(row, v):
            ops.add_(v, ops.remote_load(buffer, row))
            ops.remote_store(buffer, row, v)
            return row + 1

        ops.repeat(ir.create_graph(body, number(), v), 3, number(), v)
        return v, [store(ops.remote_load(buffer, i)) for i in range(3)]

    session, (v, outs) = started(build)
    with session:
        found = session.run()
        np.testing.assert_array_equal(session.read_variable_data(v), np.ones(W))
        np.testing.assert_array_equal([found[s] for s in outs], f32(3, W) + 1)


def test_a_graph_marked_at_one_site_and_looped_at_another():
    """Only the first hands its input over; the loop gives each iteration the same."""

    def build(ir):
        buffer, _ = entries(f32(3, W))
        a, b = (popxl.variable(np.zeros(W, np.float32), name=n) for n in "ab")

        def body(row, v):
            ops.add_(v, ops.remote_load(buffer, row))
            ops.remote_store(buffer, row, v)
            return row + 1

        graph = ir.create_graph(body, number(), a)
        info = ops.call_with_info(graph, number(), a)
        info.set_parent_input_modified(a)
        ops.repeat(graph, 3, number(), b)
        return a, b, [store(ops.remote_load(buffer, i)) for i in range(3)]

    session, (a, b, outs) = started(build)
    with session:
        found = session.run()
        np.testing.assert_array_equal(session.read_variable_data(a), f32(3, W)[0])
        np.testing.assert_array_equal(session.read_variable_data(b), np.zeros(W))
        np.testing.assert_array_equal([found[s] for s in outs], f32(3, W))


# ---- memory and time that change no value ------------------------------------------------------
def training(resident: int = 0) -> Callable[[popxl.Ir], Any]:
    """Three steps of accumulation in remote buffers."""

    def build(ir):
        (weights, variables), (moments, _) = entries(f32(4, W)), entries(f32(4, W, seed=1))
        for buffer in (weights, moments):
            buffer.resident = resident

        def body(row):
            w, m = ops.remote_load(weights, row), ops.remote_load(moments, row)
            m = m * 0.9 + ops.tanh(w) * 0.1
            ops.remote_store(moments, row, m)
            ops.remote_store(weights, row, w - m)
            return row + 1

        ops.repeat(ir.create_graph(body, number()), 4, number())
        return variables

    return build


def values(session: popxl.Session, variables: list[popxl.Variable]) -> np.ndarray:
    with session:
        for _ in range(3):
            session.run()
        return np.stack([session.read_variable_data(v) for v in variables])


@pytest.mark.parametrize("resident", [1, 3, 9])
def test_resident_entries_give_the_same_bits(resident):
    np.testing.assert_array_equal(
        values(*started(training(resident))), values(*started(training()))
    )


def test_waiting_for_every_array_gives_the_same_bits(monkeypatch):
    expected = values(*started(training()))
    monkeypatch.setattr(program_module, "_IN_FLIGHT", 0)
    np.testing.assert_array_equal(values(*started(training())), expected)


def test_a_hint_is_no_segment():
    """In a program whose other steps the host does."""
    values = f32(2, W)

    def build(ir, hinted: bool):
        buffer, _ = entries(values)

        def move(row):
            if hinted:
                ops.remote_code_load(ir.create_empty_graph("code"), "executable")
            ops.remote_store(buffer, row + 1, ops.remote_load(buffer, row))
            return row + 1

        ops.repeat(ir.create_graph(move, number()), 1, number())

    for hinted in (True, False):
        ir = popxl.Ir()
        with ir.main_graph:
            build(ir, hinted)
        assert popxl.Session(ir).schedule.segments == []
        loads = sum(part.code_loads for part in popxl.plan.plan_of(ir).parts)
        assert loads == hinted


# ---- outlined graphs ----------------------------------------------------------------------------
@pytest.mark.parametrize("surrounded", ["before", "after"])
def test_an_outlined_graph_has_the_same_bits_in_other_surroundings(surrounded):
    """Alone, products that it takes or returns would be merged with its sums or others' into
    operations that round once."""
    x, w, half = f32(64, 64), f32(64, 64, seed=1), f32(64, 64, seed=2)

    def layer(x, w):
        return (x + w) * w

    def build(around: str) -> Callable[[popxl.Ir], tuple[popxl.DeviceToHostStream, ...]]:
        def write(ir):
            a, b = popxl.variable(x), popxl.variable(w)
            product = popxl.variable(x * half)
            if around == "before":
                product = a * popxl.variable(half)
            graph = ir.create_graph(layer, a, b)
            outline(graph)
            (y,) = ops.call(graph, product, b)
            return store(y), store(y + a if around == "after" else y)

        return write

    found = []
    for around in ("", surrounded):
        session, (out, more) = started(build(around))
        assert kinds(session).count("Run") == 1
        with session:
            results = session.run()
        found.append((results[out], results[more] if around == "after" else results[out] + x))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    if surrounded == "after":
        np.testing.assert_array_equal(found[0][1], found[1][1])


def test_the_bits_of_an_outlined_graph_do_not_depend_on_which_outputs_are_used():
    """Alone, a product would be merged with a sum where nothing else needs it."""
    x, w = f32(64, 64), f32(64, 64, seed=1)
    inside: list[popxl.Tensor] = []

    def layer(x, w):
        inside[:] = [x * w]
        return inside[0] + x, inside[0]

    def build(used: int) -> Callable[[popxl.Ir], list[popxl.DeviceToHostStream]]:
        def write(ir):
            a, b = popxl.variable(x), popxl.variable(w)
            graph = ir.create_graph(layer, a, b)
            outline(graph, saved=inside)
            return [store(t) for t in ops.call(graph, a, b)[:used]]

        return write

    found = []
    for used in (1, 2):
        session, outs = started(build(used))
        (segment,) = session.schedule.segments
        assert len(segment.nodes[0].regions[0].graph.outputs) == used
        with session:
            found.append(session.run()[outs[0]])
    np.testing.assert_array_equal(*found)
    np.testing.assert_array_equal(found[0], x * w + x)


def test_a_call_of_an_outlined_graph_computes_what_is_used_alone():
    x, w = f32(64, 64), f32(64, 64, seed=1)
    inside: list[popxl.Tensor] = []

    def layer(x, w):
        rows = ops.tanh(x @ w)
        inside[:] = [rows, ops.transpose(rows)]
        return ops.gelu(rows + x) @ w, inside[1]

    def build(ir):
        a, b = popxl.variable(x), popxl.variable(w)
        graph = ir.create_graph(layer, a, b)
        outline(graph, saved=inside)
        y, turned = ops.call(graph, a, b)
        _, again = ops.call(graph, a, b)
        return store(y), store(turned), store(again)

    session, (y, turned, again) = started(build)
    texts = [str(exe.as_text()) for exe in executables(session)]
    assert sorted(text.count(" dot(") for text in texts) == [1, 2]
    with session:
        results = session.run()
    rows = np.tanh(x.astype(np.float64) @ w)
    sums = torch.tensor(rows + x)
    expected = torch.nn.functional.gelu(sums, approximate="tanh").numpy() @ w
    np.testing.assert_allclose(results[y], expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(results[turned], rows.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(results[again], results[turned])


def test_a_graph_that_writes_in_place_is_compiled_apart_as_a_whole():
    inside: list[popxl.Tensor] = []

    def layer(x):
        y = x * 2
        inside[:] = [y + 1]
        ops.add_(y, inside[0])
        return y

    def build(ir):
        a = popxl.variable(f32(W))
        graph = ir.create_graph(layer, a)
        outline(graph, saved=inside)
        return store(*ops.call(graph, a))

    session, out = started(build)
    with session:
        np.testing.assert_allclose(session.run()[out], 4 * f32(W) + 1, rtol=1e-6)


def test_tensors_of_another_graph_are_refused_where_a_graph_is_cut():
    ir = popxl.Ir()
    one, two = (
        ir.create_graph(lambda x: x * 2, popxl.TensorSpec((W,), popxl.float32)) for _ in "12"
    )
    with pytest.raises(ValueError, match="is not in graph"):
        outline(one, saved=two.outputs)


def deep(layers: int) -> Callable[[popxl.Ir], Any]:
    """A chain of layers written out, each an outlined graph; and the gradient."""

    def build(ir):
        buffer, _ = entries(f32(layers, W))
        x = popxl.variable(np.ones(W, np.float32))
        graph = ir.create_graph(lambda x, w: ops.tanh(x * w), x, x)
        info = autodiff(graph)
        outline(graph), outline(info.graph)
        y, calls = x, []
        for i in range(layers):
            calls.append(ops.call_with_info(graph, y, ops.remote_load(buffer, i)))
            y = calls[-1].outputs[0]
        grad = popxl.constant(np.ones(W, np.float32))
        for call in reversed(calls):
            grad, _ = ops.call(info.graph, grad, inputs_dict=info.inputs_dict(call))
        return store(y), store(grad)

    return build


def test_segments_of_equal_graphs_share_an_executable():
    session, (y, grad) = started(deep(4))
    assert len(session.schedule.segments) > len(executables(session))
    with session:
        found = session.run()
    value, slope = np.ones(W), np.ones(W)
    for w in f32(4, W).astype(np.float64):
        value = np.tanh(value * w)
        slope = slope * w * (1 - value**2)
    np.testing.assert_allclose(found[y], value, rtol=1e-5)
    np.testing.assert_allclose(found[grad], slope, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "write", [deep, lambda layers: phased_of(layers)], ids=["outlined", "loop"]
)
def test_the_number_of_compiles_does_not_depend_on_the_number_of_layers(write, monkeypatch):
    monkeypatch.delenv("POPXL_CACHE_DIR")
    counts = {started(write(layers))[0].startup_stats.compiles for layers in (4, 12)}
    assert len(counts) == 1


def phased_of(layers: int) -> Callable[[popxl.Ir], Any]:
    def build(ir):
        buffer, _ = entries(f32(layers, W))
        x = popxl.variable(np.ones(W, np.float32))

        def layer(x, row):
            return ops.tanh(ops.remote_load(buffer, row) * x), row + 1

        return store(ops.repeat(ir.create_graph(layer, x, number()), layers, x, number())[0])

    return build
