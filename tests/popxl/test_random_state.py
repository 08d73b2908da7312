"""Programs drawn at random that read and change state in loops, branches and calls, against numpy.

Changes often do not depend on what was read before them, so that nothing but the order in which the
program is written says what comes first (`test_loops_and_changes.py` has each kind by itself).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

import popxl
from popxl import ops
from tests.popxl.programs import store

ROWS, RUNS = 5, 2
GIVEN = np.arange(ROWS, dtype=np.float32) / 2 + 0.25
SEEDS = [*range(8), *(pytest.param(i, marks=pytest.mark.slow) for i in range(8, 80))]

Write = Callable[[list[popxl.Tensor], popxl.Tensor], popxl.Tensor | None]


@dataclass
class State:
    """Two variables of ROWS numbers, and a remote buffer of ROWS entries of one."""

    variables: list[np.ndarray]
    buffer: np.ndarray


@dataclass(frozen=True)
class Statement:
    """A statement as popxl writes it (on the variables and a given tensor), and as numpy does it.
    Both may return a number."""

    write: Write
    do: Callable[[State], float | None]


def _start() -> State:
    rows = np.arange(1, ROWS + 1, dtype=np.float64)
    return State([rows.copy(), rows + 10], rows * 100)


def _repeat(body, count: int, *inputs: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
    return ops.repeat(popxl.gir().create_graph(body, *inputs), count, *inputs)


def _zero() -> popxl.Tensor:
    return ops.init((), popxl.float32)


# ---- statements ---------------------------------------------------------------------------------
class Author:
    """Draws statements; equal seeds give equal programs."""

    def __init__(self, seed: int, buffer: popxl.RemoteBuffer) -> None:
        self.draw, self.buffer = random.Random(seed), buffer

    def statement(self) -> Statement:
        kinds = [self.read_buffer, self.read_variable, self.start_from_variable, self.store_entry,
                 self.overwrite, self.overwrite_row, self.move, self.change, self.fill]  # fmt: skip
        return self.draw.choice(kinds)()

    def read_buffer(self) -> Statement:
        def body(total, row):
            return total * 0.5 + ops.remote_load(self.buffer, row).reshape(()), row + 1

        def do(state: State) -> float:
            total = 0.0
            for value in state.buffer:
                total = total * 0.5 + value
            return total

        return Statement(
            lambda v, g: _repeat(body, ROWS, _zero(), popxl.constant(0, popxl.int32))[0], do
        )

    def read_variable(self) -> Statement:
        which, row = self.draw.randrange(2), self.draw.randrange(ROWS)

        def body(total, rows):
            return total * 0.5 + rows[row]

        return Statement(
            lambda v, g: _repeat(body, 3, _zero(), v[which])[0],
            lambda state: state.variables[which][row] * 1.75,
        )

    def start_from_variable(self) -> Statement:
        which = self.draw.randrange(2)
        return Statement(
            lambda v, g: ops.sum(_repeat(lambda rows: rows * 0.5 + 1.0, 2, v[which])[0]),
            lambda state: float((state.variables[which] * 0.25 + 1.5).sum()),
        )

    def store_entry(self) -> Statement:
        row, value = self.draw.randrange(ROWS), float(self.draw.randrange(50))

        def do(state: State) -> None:
            state.buffer[row] = value

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> None:
            ops.remote_store(self.buffer, row, popxl.constant([value]))

        return Statement(write, do)

    def overwrite(self) -> Statement:
        which = self.draw.randrange(2)

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> None:
            ops.var_updates.copy_var_update_(v[which], given + 4.0)

        def do(state: State) -> None:
            state.variables[which][:] = GIVEN + 4

        return Statement(write, do)

    def overwrite_row(self) -> Statement:
        which, row = self.draw.randrange(2), self.draw.randrange(ROWS)
        value = float(self.draw.randrange(50))

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> None:
            part = ops.slice_(v[which], row, row + 1)
            ops.var_updates.copy_var_update_(part, popxl.constant([value]))

        def do(state: State) -> None:
            state.variables[which][row] = value

        return Statement(write, do)

    def move(self) -> Statement:
        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> None:
            ops.var_updates.copy_var_update_(v[0], v[1])

        def do(state: State) -> None:
            state.variables[0][:] = state.variables[1]

        return Statement(write, do)

    def change(self) -> Statement:
        which = self.draw.randrange(2)

        def body(rows: popxl.TensorByRef, given):
            ops.scaled_add_(rows, given, a=0.5)

        def do(state: State) -> None:
            for _ in range(3):
                state.variables[which][:] = state.variables[which] * 0.5 + GIVEN

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> None:
            _repeat(body, 3, v[which], given)

        return Statement(write, do)

    def fill(self) -> Statement:
        def body(row):
            ops.remote_store(self.buffer, row, ops.cast(row, popxl.float32).reshape((1,)))
            return row + 1

        def do(state: State) -> None:
            state.buffer[:] = np.arange(ROWS)

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> None:
            _repeat(body, ROWS, popxl.constant(0, popxl.int32))

        return Statement(write, do)

    # ---- blocks ---------------------------------------------------------------------------------
    def block(self) -> Statement:
        """A few statements: as they are, in a call, in a loop, or in a branch."""
        statements = [self.statement() for _ in range(self.draw.randint(1, 4))]
        kind = self.draw.choice(["plain", "call", "loop", "branch"])
        count = self.draw.randint(1, 3) if kind == "loop" else 1
        return Statement(partial(_write_block, kind, count, statements),
                         partial(_do_block, count, statements))  # fmt: skip


def _write_block(
    kind: str,
    count: int,
    statements: list[Statement],
    variables: list[popxl.Tensor],
    given: popxl.Tensor,
) -> popxl.Tensor:
    def body(total, first: popxl.TensorByRef, second: popxl.TensorByRef, given):
        for statement in statements:
            found = statement.write([first, second], given)
            total = total if found is None else total * 0.5 + found
        return total * 1.0

    inputs = (_zero(), *variables, given)
    if kind == "plain":
        return body(*inputs)
    if kind == "loop":
        return _repeat(body, count, *inputs)[0]
    graph = popxl.gir().create_graph(body, *inputs)
    if kind == "call":
        return ops.call(graph, *inputs)[0]
    other = popxl.gir().create_graph(lambda total, *_: total * 1.0, *inputs)
    taken = ops.greater(given[1], given[0])
    return ops.conditional(taken, graph, other, inputs, inputs)[0]


def _do_block(count: int, statements: list[Statement], state: State) -> float:
    total = 0.0
    for _ in range(count):
        for statement in statements:
            found = statement.do(state)
            total = total if found is None else total * 0.5 + found
    return total


# ---- the test -----------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", SEEDS)
def test_state_is_read_and_changed_in_the_order_of_the_program(seed):
    ir, state = popxl.Ir(), _start()
    with ir.main_graph:
        variables = [popxl.variable(v.astype(np.float32)) for v in state.variables]
        buffer = popxl.remote_buffer((1,), popxl.float32, ROWS)
        entries = [
            popxl.remote_variable(np.float32([v]), buffer, i) for i, v in enumerate(state.buffer)
        ]
        stream = popxl.h2d_stream((ROWS,), popxl.float32)
        given = ops.host_load(stream)
        author = Author(seed, buffer)
        blocks = [author.block() for _ in range(author.draw.randint(2, 5))]
        results = [store(block.write(variables, given)) for block in blocks]
    with popxl.Session(ir) as session:
        for _ in range(RUNS):  # the second begins with what the first has left
            found = session.run({stream: GIVEN})
            expected = [block.do(state) for block in blocks]
            np.testing.assert_allclose([found[r] for r in results], expected, rtol=1e-4)
        for variable, value in zip(variables, state.variables, strict=True):
            np.testing.assert_allclose(session.get_tensor_data(variable), value, rtol=1e-4)
        for entry, value in zip(entries, state.buffer, strict=True):
            np.testing.assert_allclose(session.get_tensor_data(entry), [value], rtol=1e-4)
