"""A loop reads what was there before later changes, also of changes that do not depend on it.

XLA for CPU does not keep that order with the switch that saves copies of state
(`popxl/_devices/cpu.py`), so code with loops does not get it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._devices import cpu
from popxl.transforms import autodiff
from tests.popxl.programs import run_ir, store
from tests.slow import slow

ROWS = 8
START = np.arange(1, ROWS + 1, dtype=np.float32).reshape(ROWS, 1)
AFTER = 100.0


# ---- what loops read ----------------------------------------------------------------------------
def _buffer() -> popxl.RemoteBuffer:
    buffer = popxl.remote_buffer((1,), popxl.float32, ROWS)
    for row in range(ROWS):
        popxl.remote_variable(START[row], buffer, row)
    return buffer


def _sum_of_entries(buffer: popxl.RemoteBuffer) -> popxl.Tensor:
    def body(total, row):
        return total + ops.remote_load(buffer, row), row + 1

    total, first = ops.init((1,), popxl.float32), popxl.constant(0, popxl.int32)
    return ops.repeat(popxl.gir().create_graph(body, total, first), ROWS, total, first)[0]


def _sum_of_rows(variable: popxl.Tensor) -> popxl.Tensor:
    def body(total, row, rows):
        part = ops.dynamic_slice(rows, row, [0], [1], True)
        return total + part.reshape((1,)), row + 1

    total, first = ops.init((1,), popxl.float32), popxl.constant([0], popxl.uint32)
    graph = popxl.gir().create_graph(body, total, first, variable)
    return ops.repeat(graph, ROWS, total, first, variable)[0]


# ---- changes ------------------------------------------------------------------------------------
def _store_entries(buffer: popxl.RemoteBuffer) -> None:
    for row in range(ROWS):
        ops.remote_store(buffer, row, popxl.constant([AFTER]))


def _store_entries_in_a_loop(buffer: popxl.RemoteBuffer) -> None:
    def body(row):
        ops.remote_store(buffer, row, popxl.constant([AFTER]))
        return row + 1

    first = popxl.constant(0, popxl.int32)
    ops.repeat(popxl.gir().create_graph(body, first), ROWS, first)


def _overwrite(variable: popxl.Tensor) -> None:
    stream = popxl.h2d_stream(variable.shape, variable.dtype, name="after")
    ops.var_updates.copy_var_update_(variable, ops.host_load(stream) + 1.0)


def _overwrite_rows(variable: popxl.Tensor) -> None:
    for row in range(ROWS):
        part = ops.slice_(variable, row, row + 1)
        ops.var_updates.copy_var_update_(part, popxl.constant([[AFTER]]))


def _overwrite_rows_in_a_loop(variable: popxl.Tensor) -> None:
    def body(row, rows: popxl.TensorByRef):
        ops.dynamic_update_(rows, row, popxl.constant([[AFTER]]), [0], [1], True)
        return row + 1

    first = popxl.constant([0], popxl.uint32)
    ops.repeat(popxl.gir().create_graph(body, first, variable), ROWS, first, variable)


CHANGES: dict[str, tuple[Callable[..., popxl.Tensor], Callable[..., None]]] = {
    "entries of a buffer": (_sum_of_entries, _store_entries),
    "entries of a buffer, in a loop": (_sum_of_entries, _store_entries_in_a_loop),
    "a variable": (_sum_of_rows, _overwrite),
    "parts of a variable": (_sum_of_rows, _overwrite_rows),
    "parts of a variable, in a loop": (_sum_of_rows, _overwrite_rows_in_a_loop),
}

IN_CALLS = {"entries of a buffer", "a variable"}  # the others change the same in other ways


def _loop_then_change(name: str, in_call: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(what the loop returned, what was there at the end)."""
    reads, changes = CHANGES[name]
    ir = popxl.Ir()
    with ir.main_graph:
        state = _buffer() if reads is _sum_of_entries else popxl.variable(START)
        if in_call and isinstance(state, popxl.RemoteBuffer):
            (total,) = ops.call(ir.create_graph(lambda: reads(state)))
        elif in_call:
            (total,) = ops.call(ir.create_graph(reads, state), state)
        else:
            total = reads(state)
        changes(state)
        out, end = store(total), store(reads(state))
        feeds = {s: np.full(s.shape, AFTER - 1, np.float32) for s in ir.get_all_h2d_streams()}
    with popxl.Session(ir) as session:
        found = session.run(feeds)
    return found[out], found[end]


@pytest.mark.parametrize(
    ("name", "in_call"),
    [
        *((name, False) for name in CHANGES),
        *((name, True) if name in IN_CALLS else slow(name, True) for name in CHANGES),
    ],
)
def test_a_loop_reads_what_was_there_before(name, in_call):
    total, end = _loop_then_change(name, in_call)
    np.testing.assert_array_equal(total, [START.sum()])
    np.testing.assert_array_equal(end, [ROWS * AFTER])


def test_a_loop_in_an_iteration_reads_what_was_there_before_the_iteration_changes_it():
    ir = popxl.Ir()
    ir.num_host_transfers = 3
    with ir.main_graph:
        given = popxl.h2d_stream((ROWS, 1), popxl.float32)
        sums = popxl.d2h_stream((1,), popxl.float32)

    def iteration(rows: popxl.TensorByRef):
        ops.host_store(sums, _sum_of_rows(rows))
        ops.var_updates.copy_var_update_(rows, ops.host_load(given))

    with ir.main_graph:
        variable = popxl.variable(START)
        ops.repeat(ir.create_graph(iteration, variable), 3, variable)
    data = np.random.default_rng(0).integers(0, 100, (3, ROWS, 1)).astype(np.float32)
    with popxl.Session(ir) as session:
        found = session.run({given: data})[sums]
    np.testing.assert_array_equal(found[:, 0], [START.sum(), data[0].sum(), data[1].sum()])


def test_the_gradient_of_a_loop_reads_what_was_there_before():
    ir = popxl.Ir()
    with ir.main_graph:
        variable = popxl.variable(START)

        def loop(x, w):
            graph = popxl.gir().create_graph(lambda x, w: ops.sin(x) + w * w, x, w)
            return ops.sum(ops.repeat(graph, 3, x, w)[0])

        start = ops.init(START.shape, popxl.float32)
        graph = ir.create_graph(loop, start, variable)
        info = autodiff(graph, grads_required=[graph.inputs[1]])
        call = ops.call_with_info(graph, start, variable)
        (grad,) = ops.call(info.graph, popxl.constant(1.0), inputs_dict=info.inputs_dict(call))
        _overwrite_rows(variable)
        out = store(grad)
    value, expected = np.zeros_like(START), np.zeros_like(START)
    for _ in range(3):
        expected = np.cos(value) * expected + 2 * START
        value = np.sin(value) + START**2
    np.testing.assert_allclose(run_ir(ir, [out])[0], expected, rtol=1e-4, atol=1e-5)


# ---- the switch that is only for code without loops ---------------------------------------------
NO_CONTROL_FLOW = re.compile("(?!)")  # matches nothing


@pytest.mark.parametrize("name", ["a variable", "parts of a variable"])
def test_it_would_not_with_the_switch_that_is_only_for_code_without_loops(name, monkeypatch):
    """The fault of XLA: if this fails after an upgrade of jaxlib, all code can have the switch."""
    monkeypatch.setattr(cpu, "_CONTROL_FLOW", NO_CONTROL_FLOW)
    total, end = _loop_then_change(name)
    assert total != START.sum()
    np.testing.assert_array_equal(end, [ROWS * AFTER])
