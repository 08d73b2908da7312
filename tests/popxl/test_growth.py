"""Scaling: work grows in proportion to the size of a program.

Work is counted in calls of Python functions, which no other process disturbs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._devices import cpu
from popxl._run.device_variables import _local_shards
from popxl._schedule.schedule_builder import build_schedule
from popxl._storage.replica_arrays import _build_shards
from popxl.errors import popart_exception
from popxl.transforms import autodiff
from tests.popxl.programs import graph_of, run_ir, store

pytestmark = pytest.mark.usefixtures("compiled_quickly")

SPEC, FLAG = popxl.TensorSpec((2,), popxl.float32), popxl.TensorSpec((), popxl.bool)


def _work(function: Callable[[], object]) -> int:
    """Calls of Python functions, generators that go on included."""
    count = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def _buffer(entries: int = 1) -> popxl.RemoteBuffer:
    return popxl.remote_buffer((2,), popxl.float32, entries)


def _x() -> popxl.Variable:
    return popxl.variable(np.ones(2, np.float32))


def conditionals_in_depth(n: int) -> None:
    buffer, flag = _buffer(), popxl.variable(True)
    graph = graph_of(lambda x, c: x + ops.remote_load(buffer, 0), SPEC, FLAG)
    for _ in range(n):

        def body(x, c, graph=graph):
            (y,) = ops.conditional(c, graph, graph, [x, c], [x, c])
            ops.remote_store(buffer, 0, y)
            return y

        graph = graph_of(body, SPEC, FLAG)
    store(ops.call(graph, _x(), flag)[0])


def loads_beside_an_update_in_place(n: int) -> None:
    buffer, total = _buffer(n), _x()
    entry = ops.remote_load(buffer, 0)
    ops.add_(entry, total)
    ops.remote_store(buffer, 0, entry)
    for i in range(1, n):
        total = total + ops.remote_load(buffer, i)
    store(total)


def conditionals_in_a_row(n: int) -> None:
    buffer, flag, x = _buffer(), popxl.variable(True), _x() * 1.0
    then = graph_of(lambda x: x + ops.remote_load(buffer, 0), SPEC)
    otherwise = graph_of(lambda x: x * 2.0, SPEC)
    for _ in range(n):
        (x,) = ops.conditional(flag, then, otherwise, [x], [x])
    store(x)


def values_that_a_gradient_takes(n: int) -> None:
    def chain(x):
        for _ in range(n):
            x = ops.sin(x)
        return x

    graph, x = graph_of(chain, SPEC), _x()
    grad = autodiff(graph)
    info = ops.call_with_info(graph, x)
    store(ops.call(grad.graph, x, inputs_dict=grad.inputs_dict(info))[0])


def calls_in_depth(n: int) -> None:
    buffer = _buffer()
    graph = graph_of(lambda x: x + ops.remote_load(buffer, 0), SPEC)
    for _ in range(n):
        graph = graph_of(lambda x, graph=graph: ops.call(graph, x)[0] + 1.0, SPEC)
    store(ops.call(graph, _x())[0])


def calls_in_a_row(n: int) -> None:
    graph, x, scale = graph_of(lambda x, y: ops.tanh(x * y), SPEC, SPEC), _x(), _x()
    for _ in range(n):
        (x,) = ops.call(graph, x, scale)
    store(x)


def writes_to_slices(n: int) -> None:
    x, one = popxl.variable(np.ones((n, 4), np.float32)), popxl.constant(np.float32(1))
    for i in range(n):
        ops.add_(ops.slice_(x, i, i + 1, axis=0), one)


@pytest.mark.parametrize(
    ("write", "n"),
    [
        (conditionals_in_depth, 8),
        (conditionals_in_a_row, 50),
        (loads_beside_an_update_in_place, 100),
        (values_that_a_gradient_takes, 100),
        (calls_in_depth, 50),
        (calls_in_a_row, 50),
        (writes_to_slices, 50),
    ],
)
def test_twice_the_program_is_twice_the_work(write, n):
    def work(n: int) -> int:
        def whole() -> None:
            ir = popxl.Ir()
            with ir.main_graph:
                write(n)
            build_schedule(ir)

        return _work(whole)

    work(2)  # what is made once
    assert work(2 * n) < 2.2 * work(n)


def variables_that_change(n: int) -> None:
    for _ in range(n):
        ops.add_(_x(), popxl.constant(np.float32(1)))


def variables_that_become_one_value(n: int) -> None:
    value = _x() * 2.0
    for _ in range(n):
        ops.var_updates.copy_var_update_(_x(), value)


def variables_that_are_read(n: int) -> None:
    store(ops.sum(ops.concat([_x() for _ in range(n)])))


def variables_that_a_loop_changes(n: int) -> None:
    buffer, variables = _buffer(), [_x() for _ in range(n)]

    def body(*ts: popxl.TensorByRef) -> None:
        entry = ops.remote_load(buffer, 0)
        for t in ts:
            ops.add_(t, entry)

    ops.repeat(graph_of(body, *(v.spec for v in variables)), 2, *variables)


def values_that_a_loop_carries(n: int) -> None:
    buffer, variables = _buffer(), [_x() for _ in range(n)]

    def body(*ts):
        entry = ops.remote_load(buffer, 0)
        return [t + entry for t in ts]

    store(ops.repeat(graph_of(body, *(v.spec for v in variables)), 2, *variables)[0])


@pytest.mark.parametrize(
    "write",
    [
        variables_that_change,
        variables_that_become_one_value,
        variables_that_are_read,
        variables_that_a_loop_changes,
        values_that_a_loop_carries,
    ],
)
def test_a_run_of_twice_the_variables_is_twice_the_work(write):
    def work(n: int) -> tuple[int, int]:
        ir = popxl.Ir()
        with ir.main_graph:
            write(n)
        scheduling = _work(lambda: build_schedule(ir))
        with popxl.Session(ir) as session:
            session.run()
            return scheduling, _work(session.run)

    work(2)  # what is made once
    n = 40
    for once, twice in zip(work(n), work(2 * n), strict=True):
        assert twice < 2.2 * once


@pytest.mark.parametrize("kind", [popxl.Tensor, popxl.Graph, popxl.Ir, popxl.HostToDeviceStream])
def test_what_lists_of_thousands_hold_is_compared_without_python(kind):
    assert (kind.__eq__, kind.__hash__) == (object.__eq__, object.__hash__)


def test_no_segment_takes_more_entries_than_xla_compiles_fast():
    ir = popxl.Ir()
    with ir.main_graph:
        loads_beside_an_update_in_place(1000)
    schedule = build_schedule(ir)
    assert max(len(segment.args) for segment in schedule.segments) < 300


def _in_depth(graph: popxl.Graph, depth: int) -> popxl.Graph:
    """Calls of a graph in each other; each adds 1."""
    for _ in range(depth):
        graph = graph_of(lambda x, graph=graph: ops.call(graph, x)[0] + 1, SPEC)
    return graph


@pytest.fixture
def short_stack() -> Iterator[None]:
    """Half of what Python's stack is by default."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before // 2)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("reads_buffer", [False, True])
def test_calls_may_be_nested_deeply(reads_buffer, short_stack):
    """Calls can nest as deep as Python's stack, whose limit stays."""
    depth = most = sys.getrecursionlimit()
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = _buffer()
        popxl.remote_variable(np.full(2, 0.5, np.float32), buffer)
        graph = graph_of(lambda x: x + (ops.remote_load(buffer, 0) if reads_buffer else 0.5), SPEC)
        out = store(ops.call(_in_depth(graph, depth), _x())[0])
    assert popxl.plan.plan_of(ir).parts
    (y,) = run_ir(ir, [out])
    assert y.tolist() == [depth + 1.5] * 2
    assert sys.getrecursionlimit() == most


def test_gradients_go_through_calls_that_are_nested_deeply():
    depth = 250
    ir = popxl.Ir()
    with ir.main_graph:
        graph = _in_depth(graph_of(lambda x: x * x, SPEC), depth)
        gradient, x = autodiff(graph), _x()
        info = ops.call_with_info(graph, x)
        inputs = gradient.inputs_dict(info)
        out = store(ops.call(gradient.graph, popxl.constant(np.ones(2)), inputs_dict=inputs)[0])
    (dx,) = run_ir(ir, [out])
    assert dx.tolist() == [2.0, 2.0]


def _conditionals(depth: int) -> tuple[popxl.Ir, popxl.DeviceToHostStream]:
    """Nested conditionals around x * 2; the other branch of each is x + 1."""
    ir = popxl.Ir()
    with ir.main_graph:
        chosen, x = popxl.variable(True, popxl.bool), _x()
        other = graph_of(lambda _, x: x + 1, chosen, x)
        graph = graph_of(lambda _, x: x * 2, chosen, x)

        def around(c: popxl.Tensor, x: popxl.Tensor, inner: popxl.Graph) -> popxl.Tensor:
            return ops.conditional(c, inner, other, [c, x], [c, x])[0]

        for _ in range(depth):
            graph = graph_of(partial(around, inner=graph), chosen, x)
        return ir, store(ops.call(graph, chosen, x)[0])


def test_conditionals_may_be_nested_sixty_times():
    ir, out = _conditionals(60)
    (y,) = run_ir(ir, [out])
    assert y.tolist() == [2.0, 2.0]


def test_conditionals_that_are_nested_too_deeply_are_named():
    with pytest.raises(popart_exception, match=r"conditional.*test_growth.*cannot be lowered"):
        run_ir(_conditionals(150)[0])


@pytest.mark.parametrize(
    "cached",
    [
        cpu._compile_empty_array,
        cpu._compile_donating_identity,
        _build_shards,
        _local_shards,
    ],
)
def test_what_is_kept_for_each_shape_is_bounded(cached):
    assert 0 < cached.cache_info().maxsize <= 4096
