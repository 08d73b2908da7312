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
from tests.slow import slow

ROWS, RUNS = 5, 2
WHOLE = 3
GIVEN = np.arange(ROWS, dtype=np.float32) / 2 + 0.25
SEEDS = [slow(0), 1, slow(2), 3, *(slow(i) for i in range(4, 160))]

Write = Callable[[list[popxl.Tensor], popxl.Tensor], popxl.Tensor | None]


@dataclass
class State:
    """State that programs change.

    Attributes:
        variables: two of ROWS numbers.
        buffer: a remote buffer of ROWS entries of one number.
        whole: a remote buffer of WHOLE entries of ROWS numbers.
        counts: a remote buffer of two entries, each a scalar.
        at: a variable, which is a row.
    """

    variables: list[np.ndarray]
    buffer: np.ndarray
    whole: np.ndarray
    counts: np.ndarray
    at: int = 0


@dataclass(frozen=True)
class Statement:
    """A statement as popxl writes it (on the variables and a given tensor), and as numpy does it.
    Both may return a number."""

    write: Write
    do: Callable[[State], float | None]


def _start() -> State:
    rows = np.arange(1, ROWS + 1, dtype=np.float64)
    whole = np.arange(WHOLE * ROWS, dtype=np.float64).reshape(WHOLE, ROWS)
    return State([rows.copy(), rows + 10], rows * 100, whole, np.array([1.0, 2.0]))


@dataclass(frozen=True)
class Buffers:
    """Remote buffers in the program and in NumPy, as in `State`."""

    buffer: popxl.RemoteBuffer
    whole: popxl.RemoteBuffer
    counts: popxl.RemoteBuffer


def _repeat(body, count: int, *inputs: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
    return ops.repeat(popxl.gir().create_graph(body, *inputs), count, *inputs)


def _zero(dtype: popxl.dtype) -> popxl.Tensor:
    return ops.init((), dtype)


def _row() -> popxl.Tensor:
    return popxl.constant(0, popxl.int32)


# ---- statements ---------------------------------------------------------------------------------
class Author:
    """Draws statements; equal seeds give equal programs."""

    def __init__(self, seed: int, buffers: Buffers) -> None:
        self.draw = random.Random(seed)
        self.buffer, self.whole, self.counts = buffers.buffer, buffers.whole, buffers.counts
        self.dtype = self.buffer.tensor_dtype

    def statement(self) -> Statement:
        kinds = [self.read_buffer, self.read_variable, self.start_from_variable, self.store_entry,
                 self.overwrite, self.overwrite_row, self.move, self.change, self.fill,
                 self.load_into_row, self.load_whole, self.store_whole, self.copy_entry,
                 self.update_entry, self.swap_entries, self.return_twice, self.count,
                 self.choose_entry, self.store_where_it_points, self.add_up]  # fmt: skip
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
            lambda v, g: _repeat(body, ROWS, _zero(self.dtype), popxl.constant(0, popxl.int32))[0],
            do,
        )

    def read_variable(self) -> Statement:
        which, row = self.draw.randrange(2), self.draw.randrange(ROWS)

        def body(total, rows):
            return total * 0.5 + rows[row]

        return Statement(
            lambda v, g: _repeat(body, 3, _zero(self.dtype), v[which])[0],
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
            ops.remote_store(self.buffer, row, popxl.constant([value], self.dtype))

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
            ops.var_updates.copy_var_update_(part, popxl.constant([value], self.dtype))

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
            ops.remote_store(self.buffer, row, ops.cast(row, self.dtype).reshape((1,)))
            return row + 1

        def do(state: State) -> None:
            state.buffer[:] = np.arange(ROWS)

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> None:
            _repeat(body, ROWS, popxl.constant(0, popxl.int32))

        return Statement(write, do)

    def add_up(self) -> Statement:
        """Add entries to what starts from zeros, by reference; at times it is read or changed
        before, or another accumulator is left as it is."""
        count, start = (
            self.draw.randrange(1, WHOLE + 1),
            self.draw.choice("untouched read changed".split()),
        )
        in_call, other = self.draw.random() < 0.5, self.draw.random() < 0.5

        def step(row, total: popxl.TensorByRef, rest: popxl.TensorByRef):
            ops.scaled_add_(total, ops.remote_load(self.whole, row), b=0.125)
            if other:
                ops.add_(rest, total)
            return row + 1

        def steps(row, total: popxl.TensorByRef, rest: popxl.TensorByRef):
            return _repeat(step, count, row, total, rest)

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> popxl.Tensor:
            total, rest = (ops.init((ROWS,), self.dtype) for _ in range(2))
            before = ops.sum(total) if start == "read" else None
            if start == "changed":
                ops.add_(total, given)
            if in_call:
                graph = popxl.gir().create_graph(steps, _row(), total, rest)
                ops.call(graph, _row(), total, rest)
            else:
                steps(_row(), total, rest)
            found = ops.sum(total * 0.5 + rest * 0.25)
            return found if before is None else found + before

        def do(state: State) -> float:
            total, rest = np.zeros(ROWS), np.zeros(ROWS)
            if start == "changed":
                total += GIVEN
            for row in range(count):
                total += 0.125 * state.whole[row]
                rest += total if other else 0.0
            return float((total * 0.5 + rest * 0.25).sum())

        return Statement(write, do)

    # ---- entries as large as a variable -----------------------------------------------------
    def load_into_row(self) -> Statement:
        which, row, entry = (
            self.draw.randrange(2),
            self.draw.randrange(ROWS),
            self.draw.randrange(ROWS),
        )

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> None:
            ops.remote_load_(self.buffer, entry, ops.slice_(v[which], row, row + 1))

        def do(state: State) -> None:
            state.variables[which][row] = state.buffer[entry]

        return Statement(write, do)

    def load_whole(self) -> Statement:
        which, entry = self.draw.randrange(2), self.draw.randrange(WHOLE)

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> None:
            ops.remote_load_(self.whole, entry, v[which])

        def do(state: State) -> None:
            state.variables[which][:] = state.whole[entry]

        return Statement(write, do)

    def store_whole(self) -> Statement:
        which, entry = self.draw.randrange(2), self.draw.randrange(WHOLE)
        backwards = self.draw.random() < 0.5

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> None:
            value = ops.slice_(v[which], ROWS - 1, None, -1) if backwards else v[which]
            ops.remote_store(self.whole, entry, value)

        def do(state: State) -> None:
            state.whole[entry] = state.variables[which][:: -1 if backwards else 1]

        return Statement(write, do)

    def copy_entry(self) -> Statement:
        """Copies an entry to both others, or to itself."""
        source = self.draw.randrange(WHOLE)
        targets = self.draw.sample(range(WHOLE), 2)

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> None:
            value = ops.remote_load(self.whole, source)
            for target in targets:
                ops.remote_store(self.whole, target, value)

        def do(state: State) -> None:
            state.whole[targets] = state.whole[source]

        return Statement(write, do)

    def update_entry(self) -> Statement:
        """Load, change, store back; what was loaded is used afterwards, or was loaded before."""
        entry, other = self.draw.randrange(WHOLE), self.draw.randrange(WHOLE)

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> popxl.Tensor:
            kept = ops.remote_load(self.whole, other)
            value = ops.remote_load(self.whole, entry)
            ops.remote_store(self.whole, entry, value * 0.5 + given)
            return ops.sum(kept) * 0.125

        def do(state: State) -> float:
            kept = state.whole[other].sum() * 0.125
            state.whole[entry] = state.whole[entry] * 0.5 + GIVEN
            return float(kept)

        return Statement(write, do)

    def swap_entries(self) -> Statement:
        """A loop whose carried values change places; it stores each in turn."""
        count = self.draw.randrange(4)
        first, second = self.draw.sample(range(WHOLE), 2)

        def body(x, y, row):
            ops.remote_store(self.whole, row, x)
            return y, x, (row + 1) % WHOLE

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> popxl.Tensor:
            x, y = (ops.remote_load(self.whole, i) for i in (first, second))
            x, y, _ = _repeat(body, count, x, y, _row())
            ops.add_(x, given)
            return ops.sum(x * 0.125 - y * 0.0625)

        def do(state: State) -> float:
            x, y = state.whole[first].copy(), state.whole[second].copy()
            for i in range(count):
                state.whole[i % WHOLE] = x
                x, y = y, x
            return float(((x + GIVEN) * 0.125 - y * 0.0625).sum())

        return Statement(write, do)

    def return_twice(self) -> Statement:
        """A call that returns a value twice, an input, and an entry; the caller changes one."""
        entry, in_loop = self.draw.randrange(WHOLE), self.draw.random() < 0.5

        def body(x, y, z, unused):
            loaded = ops.remote_load(self.whole, entry)
            value = x * 0.5 + loaded * 0.5
            if in_loop:
                ops.remote_store(self.whole, entry, value)
            return value, value, x, loaded

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> popxl.Tensor:
            inputs = (given, given, given * 2.0, given)
            if in_loop:
                outs = _repeat(body, 2, *inputs)
            else:
                outs = ops.call(popxl.gir().create_graph(body, *inputs), *inputs)
            ops.add_(outs[0], given)
            weights = (0.5, 0.25, 0.125, 0.0625)
            return ops.sum(sum((t * w for t, w in zip(outs, weights, strict=True)), given * 0.0))

        def do(state: State) -> float:
            x = GIVEN.astype(np.float64)
            for _ in range(2 if in_loop else 1):
                loaded, before = state.whole[entry].copy(), x
                x = before * 0.5 + loaded * 0.5
                if in_loop:
                    state.whole[entry] = x
            return float(((x + GIVEN) * 0.5 + x * 0.25 + before * 0.125 + loaded * 0.0625).sum())

        return Statement(write, do)

    # ---- scalars, and rows that only the device knows ---------------------------------------
    def count(self) -> Statement:
        which = self.draw.randrange(2)

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> popxl.Tensor:
            value = ops.remote_load(self.counts, which)
            ops.remote_store(self.counts, which, value * 0.5 + 1.0)
            return value

        def do(state: State) -> float:
            value = state.counts[which]
            state.counts[which] = value * 0.5 + 1
            return float(value)

        return Statement(write, do)

    def choose_entry(self) -> Statement:
        """A branch that loads, or stores and returns what it was given."""
        which, entry = self.draw.randrange(2), self.draw.randrange(WHOLE)

        def load(x, y):
            return ops.remote_load(self.whole, entry)

        def keep(x, y: popxl.TensorByRef):
            ops.remote_store(self.whole, entry, y)
            ops.add_(y, x)
            return x

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> popxl.Tensor:
            inputs = (given, v[which])
            graphs = [popxl.gir().create_graph(f, *inputs) for f in (load, keep)]
            odd = ops.equal(v[2] % 2, popxl.constant(1, popxl.int32))
            (found,) = ops.conditional(odd, *graphs, inputs, inputs)
            return ops.sum(found) * 0.125

        def do(state: State) -> float:
            if state.at % 2:
                return float(state.whole[entry].sum() * 0.125)
            state.whole[entry] = state.variables[which]
            state.variables[which][:] += GIVEN
            return float(GIVEN.sum() * 0.125)

        return Statement(write, do)

    def store_where_it_points(self) -> Statement:
        value = float(self.draw.randrange(50))

        def write(v: list[popxl.Tensor], given: popxl.Tensor) -> None:
            ops.remote_store(self.buffer, v[2], popxl.constant([value], self.dtype))
            ops.increment_mod_(v[2], 1, ROWS)

        def do(state: State) -> None:
            state.buffer[state.at] = value
            state.at = (state.at + 1) % ROWS

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
    def body(
        total, first: popxl.TensorByRef, second: popxl.TensorByRef, at: popxl.TensorByRef, given
    ):
        for statement in statements:
            found = statement.write([first, second, at], given)
            total = total if found is None else total * 0.5 + found
        return total * 1.0

    inputs = (_zero(given.dtype), *variables, given)
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
def _buffer_of(
    values: np.ndarray, dtype: popxl.dtype
) -> tuple[popxl.RemoteBuffer, list[popxl.Variable]]:
    buffer = popxl.remote_buffer(values.shape[1:], dtype, len(values))
    variables = [popxl.remote_variable(v, buffer, i, dtype) for i, v in enumerate(values)]
    return buffer, variables


@pytest.mark.parametrize("seed", SEEDS)
def test_state_is_read_and_changed_in_the_order_of_the_program(seed):
    dtype, tolerance = (popxl.float16, 2e-2) if seed % 4 == 3 else (popxl.float32, 1e-4)
    ir, state = popxl.Ir(), _start()
    with ir.main_graph:
        variables = [popxl.variable(v, dtype) for v in state.variables]
        at = popxl.variable(state.at, popxl.int32)
        buffer, entries = _buffer_of(state.buffer[:, None], dtype)
        whole, rows = _buffer_of(state.whole, dtype)
        counts, scalars = _buffer_of(state.counts, dtype)
        whole.resident = seed % 3
        stream = popxl.h2d_stream((ROWS,), dtype)
        given = ops.host_load(stream)
        author = Author(seed, Buffers(buffer, whole, counts))
        blocks = [author.block() for _ in range(author.draw.randint(2, 5))]
        results = [store(block.write([*variables, at], given)) for block in blocks]
    with popxl.Session(ir) as session:
        for _ in range(RUNS):  # the second begins with what the first has left
            found = session.run({stream: GIVEN.astype(dtype.as_numpy())})
            expected = [block.do(state) for block in blocks]
            np.testing.assert_allclose([found[r] for r in results], expected, rtol=tolerance)
        pairs = [
            *zip(variables, state.variables, strict=True),
            *zip(entries, state.buffer[:, None], strict=True),
            *zip(rows, state.whole, strict=True),
            *zip(scalars, state.counts, strict=True),
            (at, np.array(state.at)),
        ]
        for variable, value in pairs:
            left = session.get_tensor_data(variable)
            np.testing.assert_allclose(left, value, rtol=tolerance, atol=tolerance)
