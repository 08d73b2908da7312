"""Programs that are added to a session and run on its state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.session import Session
from tests.slow import slow


class Program(NamedTuple):
    """Adds the sum of its input to a weight in a buffer, and counts its runs on the device."""

    ir: popxl.Ir
    weight: popxl.tensor.Variable
    count: popxl.tensor.Variable
    x: popxl.HostToDeviceStream
    out: popxl.DeviceToHostStream


def make_program(length: int, replicas: int = 1, more: Callable[[], Any] = lambda: None) -> Program:
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((4,), popxl.float32, 1)
        buffer.kind = "weights"
        weight = popxl.remote_variable(np.arange(4, dtype=np.float32), buffer, 0)
        kept = popxl.remote_buffer((4,), popxl.float32, 1)  # as gradients: without a variable
        kept.kind = "gradients"
        inner = popxl.remote_buffer((length,), popxl.float32, 2)
        inner.kind = "activations"
        count = popxl.variable(0.0, popxl.float32, name="count")
        x = popxl.h2d_stream((length,), popxl.float32)
        ops.remote_store(inner, 1, ops.host_load(x))
        total = ops.sum(ops.remote_load(inner, 1))
        last = ops.remote_load(kept, 0)
        new = ops.remote_load(buffer, 0) + last + total
        ops.remote_store(buffer, 0, new)
        ops.remote_store(kept, 0, last + 1)
        ops.var_updates.accumulate_(count, popxl.constant(1.0))
        out = popxl.d2h_stream((4,), popxl.float32)
        ops.host_store(out, new)
        more()
    return Program(ir, weight, count, x, out)


def expected(lengths: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The weight after runs with inputs of ones of these lengths, and the outputs."""
    weight, outputs = np.arange(4, dtype=np.float32), []
    for run, length in enumerate(lengths):
        weight = weight + run + length
        outputs.append(weight)
    return weight, outputs


@pytest.mark.parametrize(
    ("placed", "replicas"),
    [
        ("host", 1),
        ("device", 1),
        ("disk", 2),
        slow("host", 2),
        slow("device", 2),
        slow("disk", 1),
    ],
)
def test_programs_of_other_lengths_run_on_one_state(
    placed: str, replicas: int, tmp_path: Path
) -> None:
    programs = {n: make_program(n, replicas) for n in (6, 3, 2)}
    for buffer in programs[6].ir.remote_buffers:
        buffer.resident = buffer.entries if placed == "device" else 0
        buffer.on_disk = buffer.entries if placed == "disk" else 0
    first, lengths = programs[6], [3, 6, 2, 2, 6, 3]
    session = Session(first.ir, "cpu", disk=tmp_path)
    runs = {n: session.add_program(program.ir) for n, program in programs.items() if n != 6}
    weight, outputs = expected(lengths)
    with session:
        for length, output in zip(lengths, outputs, strict=True):
            ones = np.ones((replicas, length), np.float32)
            found = runs.get(length, session.run)({programs[length].x: ones})
            np.testing.assert_array_equal(
                found[programs[length].out].reshape(replicas, 4), np.stack([output] * replicas)
            )
            np.testing.assert_array_equal(session.read_variable_data(first.weight), output)
        session.write_variable_data(first.weight, weight + 1)
        (after,) = runs[2]({programs[2].x: np.ones((replicas, 2), np.float32)}).values()
        np.testing.assert_array_equal(after.reshape(replicas, 4)[0], weight + 1 + len(lengths) + 2)
    np.testing.assert_array_equal(session.get_tensor_data(first.weight), after.reshape(-1, 4)[0])
    assert session.get_tensor_data(first.count) == len(lengths) + 1


def test_entries_that_are_not_shared_take_no_memory_between_runs() -> None:
    programs = {n: make_program(n) for n in (60, 30)}
    session = Session(programs[60].ir, "cpu")
    run = session.add_program(programs[30].ir)
    with session:
        session.run({programs[60].x: np.ones(60, np.float32)})
        assert session.remote_bytes() == 2 * 4 * 4
        run({programs[30].x: np.ones(30, np.float32)})
        assert session.remote_bytes() == 2 * 4 * 4


def test_a_program_of_another_structure_is_refused() -> None:
    session = Session(make_program(6).ir, "cpu")
    other = make_program(3, more=lambda: popxl.remote_buffer((1,), popxl.float32, 1))
    with pytest.raises(ValueError, match="3 remote buffers, but the session's|4 remote buffers"):
        session.add_program(other.ir)
    another = make_program(3, more=lambda: popxl.variable(1.0, popxl.float32))
    with pytest.raises(ValueError, match="has 3 variables"):
        session.add_program(another.ir)


def test_an_added_program_needs_an_attached_session() -> None:
    session, other = Session(make_program(6).ir, "cpu"), make_program(3)
    run = session.add_program(other.ir)
    with pytest.raises(ValueError, match="not attached"):
        run({other.x: np.ones(3, np.float32)})
