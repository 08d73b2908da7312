"""Numbers that the host computes: only what folds counters, with the device's results."""

from __future__ import annotations

import gc
import itertools
import operator
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._schedule.index_arithmetic import _FOLDED
from popxl._schedule.schedule import Compute, Fetch
from popxl.custom import jax_op
from popxl.transforms import autodiff
from tests.popxl.integers import INTEGERS, extremes, quotient
from tests.popxl.programs import store

FOLDED: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "fmod": lambda x, y: x - y * quotient(x, y) if y else x,
}
LEFT_TO_XLA = {"div": lambda x, y: quotient(x, y) if y else -1}


def _stored(numbers: list[Any]) -> list[popxl.DeviceToHostStream]:
    """`numbers` leave the program; what moves entries makes the host compute what it can."""
    buffer = popxl.remote_buffer((1,), popxl.float32, 1)
    ops.remote_store(buffer, 0, popxl.constant([1.0]))
    return [store(n) for n in numbers]


def _wrapped(x: int, dtype: popxl.dtype) -> np.ndarray:
    return np.array(x & (2**64 - 1), np.uint64).astype(dtype.as_numpy())


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_arithmetic_on_the_host_is_that_of_the_device_at_the_extremes(dtype):
    pairs = list(itertools.product(extremes(dtype), repeat=2))
    ir = popxl.Ir()
    with ir.main_graph:
        results, expected = [], []
        for name, meaning in {**FOLDED, **LEFT_TO_XLA}.items():
            for pair in pairs:
                result = getattr(ops, name)(*(popxl.constant(n, dtype) for n in pair))
                results.append(ops.reshape(result, (1,)))
                expected.append(_wrapped(meaning(*pair), dtype))
        (out,) = _stored([ops.concat(results)])
    with popxl.Session(ir) as session:
        found = session.run()[out]
        computed = {s.name for s in session.schedule.main.steps if isinstance(s, Compute)}
    np.testing.assert_array_equal(found, np.stack(expected))
    assert set(FOLDED) <= computed <= set(_FOLDED)


def test_an_offset_that_is_no_sum_of_counters_comes_from_the_device():
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((1,), popxl.float32, 4)

        def body(at):
            half = ops.cast(ops.cast(at, popxl.float32) * 0.5, popxl.int32)
            ops.remote_store(buffer, half, ops.reshape(ops.cast(at, popxl.float32), (1,)))
            return at + 1

        start = popxl.constant(0, popxl.int32)
        ops.repeat(ir.create_graph(body, start), 8, start)
        outs = [store(ops.remote_load(buffer, i)) for i in range(4)]
    with popxl.Session(ir) as session:
        found = session.run()
        steps = [s for r in session.schedule.routines for s in r.steps]
    assert [float(found[o].item()) for o in outs] == [1.0, 3.0, 5.0, 7.0]
    assert any(isinstance(s, Fetch) for s in steps)
    assert [s.name for s in steps if isinstance(s, Compute)] == ["add"]


def _sum_of_replicas(replicas: int) -> np.ndarray:
    """A program of collectives of whole numbers, which the host knows the inputs of."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        group = ir.replica_grouping()
        three = popxl.constant([3], popxl.int32)
        total = ops.collectives.replicated_all_reduce(three, "add", group)
        gathered = ops.collectives.replicated_all_gather(three, 0, group, "concat")
        outs = _stored([total, gathered])
    with popxl.Session(ir) as session:
        found = session.run()
    return [found[o].reshape(replicas, -1)[0] for o in outs]


def test_programs_of_different_numbers_of_replicas_in_one_process():
    for replicas in (1, 2, 4, 1):
        total, gathered = _sum_of_replicas(replicas)
        np.testing.assert_array_equal(total, [3 * replicas])
        np.testing.assert_array_equal(gathered, [3] * replicas)


@jax_op
def _times_members(x, *, group):
    """Array of one element for each member of the group: `x` times the number of members."""
    return jnp.full((group.group_size,), x * group.group_size)


def test_an_op_of_the_program_that_looks_at_its_group():
    for replicas in (1, 2):
        ir = popxl.Ir(replication=replicas)
        with ir.main_graph:
            three = popxl.constant(3, popxl.int32)
            (out,) = _stored([_times_members(three, group=ir.replica_grouping())])
        with popxl.Session(ir) as session:
            found = session.run()[out].reshape(replicas, -1)
        np.testing.assert_array_equal(found, np.full((replicas, replicas), 3 * replicas))


def test_one_program_is_written_on_for_another_number_of_replicas():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.constant(3, popxl.int32)
        for replicas in (1, 2):
            ir.replication_factor = replicas
            assert _times_members(x, group=ir.replica_grouping()).shape == (replicas,)


def test_one_program_with_another_number_of_replicas():
    ir = popxl.Ir(replication=1)
    with ir.main_graph:
        x = popxl.constant([3], popxl.int32)
        out = _stored([ops.collectives.replicated_all_reduce(x, "add", ir.replica_grouping())])[0]
    for replicas in (1, 2):
        ir.replication_factor = replicas
        with popxl.Session(ir) as session:
            found = session.run()[out].reshape(replicas, -1)
        np.testing.assert_array_equal(found, [[3 * replicas]] * replicas)


def test_nobody_keeps_a_program_that_was_run():
    def run() -> weakref.ref:
        ir = popxl.Ir(replication=2)
        with ir.main_graph:
            group = ir.replica_grouping(1, 2)
            graph = ir.create_graph(partial(_times_members, group=group), popxl.constant(1.0))
            autodiff(graph)
            x = popxl.constant([3], popxl.int32)
            results = [
                _times_members(popxl.constant(3, popxl.int32), group=group),
                ops.collectives.replicated_all_reduce(x, "add", group),
                ops.collectives.replicated_all_gather(x, 0, group, "concat"),
                ops.collectives.replicated_reduce_scatter(x, "add", group),
                ops.collectives.replica_sharded_slice(x, group),
            ]
            _stored(results)
        with popxl.Session(ir) as session:
            session.run()
        return weakref.ref(ir)

    found = run()
    gc.collect()
    assert found() is None
