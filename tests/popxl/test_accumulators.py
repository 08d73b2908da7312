"""Accumulators that start from zeros: the first iteration only stores what the others add."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from tests.popxl.programs import f32, store

pytestmark = pytest.mark.usefixtures("cached", "compiled_quickly")
STEPS, W = 3, 4
DTYPES = [popxl.float32, popxl.float16, popxl.bfloat16, popxl.int32]


def number(value: int = 0) -> popxl.Tensor:
    return popxl.constant(value, popxl.int32)


def entries(values: np.ndarray, dtype: popxl.dtype = popxl.float32) -> popxl.RemoteBuffer:
    """A buffer with the rows of `values`."""
    buffer = popxl.remote_buffer(values.shape[1:], dtype, len(values))
    for i, row in enumerate(values):
        popxl.remote_variable(row, buffer, i, dtype=dtype)
    return buffer


def add_up(buffer: popxl.RemoteBuffer, total: popxl.Tensor, count: int = STEPS) -> None:
    """Add `count` entries to `total`, in a loop of the host."""

    def step(at, total: popxl.TensorByRef):
        ops.var_updates.accumulate_(total, ops.remote_load(buffer, at))
        return at + 1

    at = number()
    ops.repeat(popxl.gir().create_graph(step, at, total), count, at, total)


def summed(build, runs: int = 1) -> tuple[popxl.Session, list[np.ndarray]]:
    """A session of a program, and what its outputs were in the last of its runs."""
    ir = popxl.Ir()
    with ir.main_graph:
        outs = [store(t) for t in build()]
    with popxl.Session(ir) as session:
        for _ in range(runs):
            found = session.run()
    return session, [found[o] for o in outs]


def test_the_schedule_runs_the_first_iteration_by_itself():
    values = f32(STEPS, W)

    def build():
        total = ops.init((W,), popxl.float32)
        add_up(entries(values), total)
        return [total]

    session, (found,) = summed(build, runs=2)
    np.testing.assert_allclose(found, values.sum(0), rtol=1e-6)
    text = str(session.schedule)
    assert "call add_up.step_subgraph(0).first(%0)" in text
    assert "2 times add_up.step_subgraph(0)(" in text
    adds = {
        segment.name: " add(" in executable.as_text()
        for segment, executable in session._program.executables.items()
        if "step" in segment.name
    }
    assert adds == {
        "add_up.step_subgraph(0).first.0": False,
        "add_up.step_subgraph(0).0": True,
    }


@pytest.mark.parametrize("count", [1, 2, STEPS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_is_right(count, dtype):
    values = np.random.default_rng(0).integers(-9, 9, (STEPS, W)).astype(dtype.as_numpy())

    def build():
        total = ops.init((W,), dtype)
        add_up(entries(values, dtype), total, count)
        return [total]

    _, (found,) = summed(build, runs=2)
    np.testing.assert_array_equal(found, values[:count].sum(0, dtype=values.dtype))


def read_before(total):
    return ops.sum(total) + 1.0


def changed_before(total):
    ops.add_(total, popxl.constant(f32(W, seed=1)))
    return popxl.constant(1.0)


def part_changed_before(total):
    ops.add_(ops.slice_(total, 1, 2), popxl.constant(f32(1, seed=1)))
    return popxl.constant(1.0)


START = {read_before: 0 * f32(W), changed_before: f32(W, seed=1),
         part_changed_before: np.array([0, f32(1, seed=1)[0], 0, 0], np.float32)}  # fmt: skip


@pytest.mark.parametrize("touch", START, ids=lambda f: f.__name__)
def test_zeros_that_something_uses_first(touch):
    values = f32(STEPS, W)

    def build():
        total = ops.init((W,), popxl.float32)
        other = touch(total)
        add_up(entries(values), total)
        return total, other

    _, (found, other) = summed(build, runs=2)
    np.testing.assert_allclose(found, START[touch] + values.sum(0), rtol=1e-5, atol=1e-6)
    assert other == 1


def test_a_view_of_zeros_is_added_to():
    values = f32(STEPS, 1)

    def build():
        total = ops.init((W,), popxl.float32)
        add_up(entries(values), ops.slice_(total, 2, 3))
        return [total]

    _, (found,) = summed(build)
    np.testing.assert_allclose(found, [0, 0, values.sum(), 0], rtol=1e-5)


def test_the_same_zeros_by_reference_and_by_value():
    values = f32(STEPS, W)

    def build():
        buffer, at, total = entries(values), number(), ops.init((W,), popxl.float32)

        def step(at, total: popxl.TensorByRef, given):
            ops.add_(total, ops.remote_load(buffer, at) + given)
            return at + 1

        graph = popxl.gir().create_graph(step, at, total, total)
        ops.repeat(graph, STEPS, at, total, total)
        return [total]

    _, (found,) = summed(build)
    np.testing.assert_allclose(found, values.sum(0), rtol=1e-5)


def test_layers_with_accumulators_of_their_own():
    """repeat(layers) { zeros; call { repeat(steps) { add } }; store }."""
    values = f32(6, W)

    def build():
        buffer, sums = entries(values), entries(np.zeros((2, W), np.float32))

        def step(at, total: popxl.TensorByRef, untouched: popxl.TensorByRef):
            ops.add_(total, ops.remote_load(buffer, at))
            return at + 1

        def steps(at, total: popxl.TensorByRef, untouched: popxl.TensorByRef):
            graph = popxl.gir().create_graph(step, at, total, untouched)
            return ops.repeat(graph, STEPS, at, total, untouched)

        def layer(row, at):
            total, untouched = (ops.init((W,), popxl.float32) for _ in range(2))
            graph = popxl.gir().create_graph(steps, at, total, untouched)
            (at,) = ops.call(graph, at, total, untouched)
            ops.remote_store(sums, row, total + untouched)
            return row + 1, at

        row, at = number(), number()
        ops.repeat(popxl.gir().create_graph(layer, row, at), 2, row, at)
        return [ops.remote_load(sums, i) for i in range(2)]

    _, found = summed(build, runs=2)
    np.testing.assert_allclose(found, values.reshape(2, STEPS, W).sum(1), rtol=1e-5)


def test_random_roundings_are_those_of_any_other_accumulator():
    values = f32(STEPS, 256)

    def with_start(start):
        def build():
            addons.enable_stochastic_rounding(popxl.gir())
            total = start()
            add_up(entries(values), total)
            return [total]

        return summed(build)[1][0]

    first = with_start(lambda: ops.init((256,), popxl.bfloat16))
    from_others = with_start(lambda: popxl.constant(np.zeros(256), popxl.bfloat16) * 1.0)
    np.testing.assert_array_equal(first, from_others)
    nearest = values.astype(first.dtype)
    assert (first != nearest).any()
