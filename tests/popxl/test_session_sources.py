"""Variables written as functions and read as copies: nothing of them stays on the host."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops

pytestmark = pytest.mark.usefixtures("cached")
ENTRIES, SIZE = 3, 1 << 10


class Program:
    """Adds one to each entry of a buffer and to a plain variable; counts calls of sources."""

    def __init__(self, replicas: int = 1, **options: bool) -> None:
        ir = popxl.Ir(replication=replicas)
        with ir.main_graph:
            buffer = popxl.remote_buffer((SIZE,), popxl.float32, ENTRIES)
            alone = ir.replica_grouping(group_size=1)
            shape = ((replicas,) if replicas > 1 else ()) + (SIZE,)
            zeros = np.broadcast_to(np.float32(0), shape)
            self.entries = [
                popxl.remote_variable(zeros, buffer, i, replica_grouping=alone)
                for i in range(ENTRIES)
            ]
            self.plain = popxl.variable(np.float32(0))
            for i in range(ENTRIES):
                ops.remote_store(buffer, i, ops.remote_load(buffer, i) + 1)
            ops.add_(self.plain, popxl.constant(1.0))
        self.shape, self.calls = shape, 0
        self.session = popxl.Session(ir, "cpu", **options)

    def value(self, number: float) -> np.ndarray:
        return np.full(self.shape, number, np.float32)

    def write(self) -> None:
        def make(number: float) -> np.ndarray:
            self.calls += 1
            return self.value(number)

        sources = {v: lambda i=i: make(10.0 * i) for i, v in enumerate(self.entries)}
        self.session.write_variables_data({**sources, self.plain: lambda: np.float64(5)})


@pytest.mark.parametrize("replicas", [1, 2])
def test_functions_are_called_when_their_values_are_needed(replicas):
    program = Program(replicas)
    program.write()
    assert program.calls == 0
    with program.session as session:
        assert program.calls == ENTRIES
        session.run()
        for i, v in enumerate(program.entries):
            assert np.array_equal(session.read_variable_data(v), program.value(10.0 * i + 1))
            assert not v._data.any()  # the host array is as it was
        assert session.read_variable_data(program.plain) == 6
    assert program.calls == ENTRIES
    for i, v in enumerate(program.entries):  # leaving has brought them to the host
        assert np.array_equal(session.get_tensor_data(v), program.value(10.0 * i + 1))


def test_written_while_attached():
    program = Program()
    with program.session as session:
        session.run()
        session.write_variable_data(program.entries[1], lambda: program.value(7))
        assert np.array_equal(session.get_tensor_data(program.entries[1]), program.value(7))
        session.run()
        found = [session.read_variable_data(v)[0] for v in program.entries]
    assert found == [2, 8, 2]


def test_without_bringing_back_the_value_that_was_written_remains():
    program = Program(weights_to_host_on_exit=False)
    program.write()
    for _ in range(2):
        with program.session as session:
            session.run()
            assert session.read_variable_data(program.entries[2])[0] == 21
        assert session.read_variable_data(program.entries[2])[0] == 20
    live = session.get_tensor_data(program.entries[2])
    assert live[0] == 20
    calls = program.calls
    session.write_variable_data(program.entries[2], program.value(1))
    assert live[0] == session.read_variable_data(program.entries[2])[0] == 1
    assert program.calls == calls


def test_what_is_read_is_a_copy_and_costs_the_program_none():
    program = Program()
    first = program.entries[0]
    with program.session as session:
        session.run()
        place, before = address(program), session.read_variable_data(first)
        session.run()
        assert address(program) == place  # updated in place
        assert np.array_equal(before, program.value(1))


def address(program: Program) -> int:
    """Returns the address of the first entry's array."""
    assert program.session._state is not None
    (entries,) = program.session._state.entries.values()
    return entries.array(0).unsafe_buffer_pointer()


def test_a_wrong_value_is_refused_when_it_is_made():
    program = Program()
    program.session.write_variable_data(program.entries[0], lambda: np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"needs data of shape \(1024,\), but got \(2,\)"):
        program.session.__enter__()
    assert not program.session.is_attached


def test_only_variables_can_be_read():
    program = Program()
    with pytest.raises(TypeError, match="only variables have host data"):
        program.session.read_variable_data(np.zeros(1))
    with pytest.raises(ValueError, match="belongs to another Ir"):
        program.session.read_variable_data(Program().plain)
