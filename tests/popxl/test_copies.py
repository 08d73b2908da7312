"""Loops over remote buffers copy no buffer: neither in XLA's program nor in memory.

The programs are what phased execution does: load an entry, use it, store it. XLA on its own copies
the whole buffer in each iteration; what prevents it is in `popxl._lower.compile` (a switch) and in
`popxl._lower.machine.Machine.load` (how an entry is read).
"""

from __future__ import annotations

import re

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._lower import compile as compile_module
from popxl._lower.devices import replica_mesh
from popxl._lower.machine import Machine
from popxl._lower.program import Program

ROWS, WIDTH = 64, 2**18  # 64 entries of 1 MiB
ENTRY = WIDTH * 4


def _buffer(rows: int = ROWS) -> popxl.RemoteBuffer:
    return popxl.remote_buffer((WIDTH,), popxl.float32, rows)


def _loop(ir: popxl.Ir, body, *buffers: popxl.RemoteBuffer) -> popxl.Variable:
    """`repeat` of `body(row, total, *buffers)` for each row; returns the variable `total`."""

    def step(row: popxl.TensorByRef, total: popxl.TensorByRef) -> None:
        body(row, total, *buffers)
        ops.increment_mod_(row, 1, ROWS)

    row = popxl.variable(0, popxl.uint32, name="row")
    total = popxl.variable(np.zeros(WIDTH, np.float32), name="total")
    ops.repeat(ir.create_graph(step, row, total), ROWS, row, total)
    return total


# Loaded values go to `total` as well: a second use of them is what tempts XLA to copy.
def _load_use_store(row, total, buffer):
    x = ops.remote_load(buffer, row)
    ops.remote_store(buffer, row, x * 0.5 + 1.0)
    total += x


def _two_entries_in_turn(row, total, buffer):
    for at in (row, (row + 1) % ROWS):
        x = ops.remote_load(buffer, at)
        ops.remote_store(buffer, at, x * 0.5 + 1.0)
        total += x


def _two_entries_at_once(row, total, buffer):
    other = (row + 1) % ROWS
    x, y = ops.remote_load(buffer, row), ops.remote_load(buffer, other)
    ops.remote_store(buffer, row, x * 0.5)
    ops.remote_store(buffer, other, y + 1.0)
    total += x * y


def _weight_and_moment(row, total, weights, moments):
    w, m = ops.remote_load(weights, row), ops.remote_load(moments, row)
    m = m * 0.9 + w * 0.1
    ops.remote_store(moments, row, m)
    ops.remote_store(weights, row, w - m)
    total += m


def _by_numpy(body, a: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """The same on one element of each row, changing the arrays; returns the total."""
    total = np.float32(0)
    for row in range(ROWS):
        following = (row + 1) % ROWS
        if body is _two_entries_at_once:
            x, y = a[row], a[following]
            a[row], a[following] = x * 0.5, y + 1
            total += x * y
        elif body is _weight_and_moment:
            moments[row] = moments[row] * 0.9 + a[row] * 0.1
            a[row] -= moments[row]
            total += moments[row]
        else:
            for at in (row, following)[: 2 if body is _two_entries_in_turn else 1]:
                total += a[at]
                a[at] = a[at] * 0.5 + 1
    return total


BODIES = [(_load_use_store, 1), (_two_entries_in_turn, 1), (_two_entries_at_once, 1),
          (_weight_and_moment, 2)]  # fmt: skip


def _program(body, buffers: int) -> tuple[popxl.Ir, list[popxl.Variable]]:
    """The program, and the variables `total`, entry 0 and the last entry of the first buffer."""
    ir = popxl.Ir()
    with ir.main_graph:
        made = [_buffer() for _ in range(buffers)]
        entries = [
            popxl.remote_variable(np.full(WIDTH, entry + 1, np.float32), made[0], entry)
            for entry in (0, ROWS - 1)
        ]
        return ir, [_loop(ir, body, *made), *entries]


def _full_copies(text: str, rows: int = ROWS) -> list[str]:
    """Copies of a whole buffer in optimised HLO."""
    pattern = rf"^.*= f32\[{rows},{WIDTH}\]\S* copy(?:-start)?\(.*$"
    return re.findall(pattern, text, re.MULTILINE)


@pytest.mark.parametrize(("body", "buffers"), BODIES)
def test_a_loop_over_rows_updates_the_buffer_in_place(body, buffers):
    ir, variables = _program(body, buffers)
    session = popxl.Session(ir)
    assert _full_copies(session._executable.as_text()) == []
    assert session._executable.memory_analysis().temp_size_in_bytes < 8 * ENTRY
    with session:
        before = _pointers(session)
        session.run()
        assert _pointers(session) == before
        found = [session.get_tensor_data(v) for v in variables]
    state = np.zeros(ROWS, np.float32)
    state[[0, -1]] = 1, ROWS
    total = _by_numpy(body, state, np.zeros(ROWS, np.float32))
    for array, value in zip(found, (total, state[0], state[-1]), strict=True):
        np.testing.assert_allclose(array, np.full(WIDTH, value), rtol=1e-5)


def _pointers(session: popxl.Session) -> list[int]:
    changing, _ = session._state
    return [s.data.unsafe_buffer_pointer() for b in changing.buffers.values()
            for s in b.addressable_shards]  # fmt: skip


def test_nested_loops_over_layers_and_steps_copy_nothing():
    """repeat(layers) { load weights; repeat(steps) { load x row, compute, store }; store }."""
    layers, steps = 8, 8
    ir = popxl.Ir()
    with ir.main_graph:
        weights = _buffer(layers)
        activations = _buffer(steps * (layers + 1))
        one = popxl.variable(np.ones(WIDTH, np.float32))
        source, target, layer = (popxl.variable(v, popxl.uint32) for v in (0, steps, 0))

        def start(row: popxl.TensorByRef, value):
            ops.remote_store(activations, row, value)
            ops.increment_mod_(row, 1, steps)

        def step(w: popxl.TensorByRef, source: popxl.TensorByRef, target: popxl.TensorByRef):
            x = ops.remote_load(activations, source)
            ops.remote_store(activations, target, x * 0.5 + w)
            ops.add_(w, popxl.constant(1.0))
            for counter in (source, target):
                ops.increment_mod_(counter, 1, steps * (layers + 1))

        def run_layer(
            layer: popxl.TensorByRef, source: popxl.TensorByRef, target: popxl.TensorByRef
        ):
            w = ops.remote_load(weights, layer)
            ops.repeat(inner, steps, w, source, target)
            ops.remote_store(weights, layer, w)
            ops.increment_mod_(layer, 1, layers)

        ops.repeat(ir.create_graph(start, layer, one), steps, layer, one)
        inner = ir.create_graph(step, one, source, target)
        ops.repeat(ir.create_graph(run_layer, layer, source, target), layers, layer, source, target)
        last = popxl.remote_variable(np.zeros(WIDTH, np.float32), weights, layers - 1)
        first = popxl.remote_variable(np.zeros(WIDTH, np.float32), weights, 0)
        out = popxl.d2h_stream((WIDTH,), popxl.float32)
        ops.host_store(out, ops.remote_load(activations, steps * (layers + 1) - 1))
    with popxl.Session(ir) as session:
        text = session._executable.as_text()
        assert _full_copies(text, layers) + _full_copies(text, steps * (layers + 1)) == []
        assert session._executable.memory_analysis().temp_size_in_bytes < 12 * ENTRY
        before = _pointers(session)
        result = session.run()[out]
        assert _pointers(session) == before
        assert {float(session.get_tensor_data(v)[3]) for v in (first, last)} == {float(steps)}
    expected = 1.0
    for _ in range(layers):
        expected = expected * 0.5 + steps - 1
    np.testing.assert_allclose(result, np.full(WIDTH, expected), rtol=1e-6)


def _copies_compiled_with(monkeypatch, body, buffers: int, **switches: object) -> int:
    for name, value in switches.items():
        monkeypatch.setitem(compile_module._SWITCHES["cpu"], name, value)
    ir, _ = _program(body, buffers)
    text = Program(ir, replica_mesh("cpu", 1)).compile().as_text()
    return len(_full_copies(text))


def test_without_the_guarded_read_a_buffer_is_copied(monkeypatch):
    """Why `Machine.load` reads inside a condition: if this fails, it can go."""
    original = Machine.load

    def unguarded(self, buffer, offset):
        self.guard_reads = False
        return original(self, buffer, offset)

    monkeypatch.setattr(Machine, "load", unguarded)
    assert _copies_compiled_with(monkeypatch, _two_entries_in_turn, 1) > 0


def test_without_the_switch_a_buffer_is_copied(monkeypatch):
    """Why `xla_cpu_copy_insertion_use_region_analysis` is set: if this fails, it can go."""
    off = {"xla_cpu_copy_insertion_use_region_analysis": False}
    assert _copies_compiled_with(monkeypatch, _two_entries_at_once, 1, **off) > 0
