"""State is changed where it is: entries give their memory and get it back, variables keep theirs.

And the reverse: memory that somebody still needs is never given away.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._devices import cpu
from tests.popxl.compiled import executables, optimised, temporary_bytes

ROWS, WIDTH = 6, 2**16
ENTRY = WIDTH * 4  # bytes
COPY = re.compile(rf"^.*= f32\[{WIDTH}\]\S* copy(?:-start)?\(.*$", re.MULTILINE)


def _buffer(rows: int = ROWS, *, width: int = WIDTH) -> popxl.RemoteBuffer:
    return popxl.remote_buffer((width,), popxl.float32, rows)


def _entries(buffer: popxl.RemoteBuffer) -> list[popxl.Variable]:
    """Variables of all entries; entry i is i + 1."""
    return [popxl.remote_variable(np.full(buffer.tensor_shape, i + 1, np.float32), buffer, i)
            for i in range(buffer.entries)]  # fmt: skip


def _variable(value: float = 0, name: str = "v", *, width: int = WIDTH) -> popxl.Variable:
    return popxl.variable(np.full(width, value, np.float32), name=name)


def _pointers(session: popxl.Session) -> list[int]:
    """Returns the addresses of entries and variables."""
    state = session._state
    assert state is not None
    arrays = [b.array(i) for b in state.entries.values() for i in range(len(b))]
    arrays += state.variables.values()
    return [s.data.unsafe_buffer_pointer() for x in arrays for s in x.addressable_shards]


def _firsts(session: popxl.Session, variables: list[popxl.Variable]) -> list[float]:
    """Element 0 of variables of which all elements are equal."""
    found = [session.read_variable_data(v) for v in variables]
    for x in found:
        np.testing.assert_array_equal(x, np.full_like(x, x.flat[0]))
    return [float(x.flat[0]) for x in found]


# ---- loops over entries -------------------------------------------------------------------------
def _loop(ir: popxl.Ir, body, *buffers: popxl.RemoteBuffer) -> popxl.Variable:
    """`repeat` of `body(row, total, *buffers)` for each row; returns the variable `total`."""

    def step(row: popxl.Tensor, total: popxl.TensorByRef) -> popxl.Tensor:
        body(row, total, *buffers)
        return row + 1

    row, total = popxl.constant(0, popxl.int32), _variable(name="total")
    ops.repeat(ir.create_graph(step, row, total), ROWS, row, total)
    return total


# Loaded values go to `total` as well: a second use of them is what tempts to copy.
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


def _by_numpy(body, a: np.ndarray, moments: np.ndarray) -> np.float32:
    """Reference in NumPy on one element of each row, in place; returns the total."""
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
IN_PLACE = [b for b in BODIES if b[0] is not _two_entries_at_once]


def _program(body, buffers: int) -> tuple[popxl.Ir, popxl.Variable, list[popxl.Variable]]:
    """The program, the variable `total` and the entries of the first buffer."""
    ir = popxl.Ir()
    with ir.main_graph:
        made = [_buffer() for _ in range(buffers)]
        entries = _entries(made[0])
        return ir, _loop(ir, body, *made), entries


@pytest.mark.parametrize(("body", "buffers"), BODIES)
def test_loops_over_entries_give_numpy_s_values(body, buffers):
    ir, total, entries = _program(body, buffers)
    with popxl.Session(ir) as session:
        session.run()
        found = _firsts(session, [total, *entries])
    state = np.arange(1, ROWS + 1, dtype=np.float32)
    expected = _by_numpy(body, state, np.zeros(ROWS, np.float32))
    np.testing.assert_allclose(found, [expected, *state], rtol=1e-5)


@pytest.mark.parametrize(("body", "buffers"), IN_PLACE)
def test_entries_and_variables_stay_where_they_are(body, buffers):
    ir, _, _ = _program(body, buffers)
    with popxl.Session(ir) as session:
        session.run()  # the first run may move arrays that JAX made without copying
        before = _pointers(session)
        for _ in range(3):
            session.run()
            assert sorted(_pointers(session)) == sorted(before)


@pytest.mark.parametrize(("body", "buffers"), BODIES)
def test_no_segment_copies_entries_or_holds_buffers(body, buffers):
    session = popxl.Session(_program(body, buffers)[0])
    text = optimised(session)
    assert COPY.findall(text) == []
    assert f"[{ROWS}," not in text
    assert temporary_bytes(session) < ENTRY


def _copies_of_two_entries() -> int:
    """In a segment that changes two entries and reads both for a third result."""
    ir = popxl.Ir()
    with ir.main_graph:
        total = _variable(name="total")
        _two_entries_at_once(0, total, _buffer())
    return len(COPY.findall(optimised(popxl.Session(ir))))


def test_without_the_switch_donated_entries_are_copied(monkeypatch):
    """Why `xla_cpu_copy_insertion_use_region_analysis` is set: if this fails, it can go."""
    assert _copies_of_two_entries() == 0
    monkeypatch.setattr(cpu, "_CONTROL_FLOW", re.compile(""))  # all code has loops
    assert _copies_of_two_entries() > 0


def test_variables_are_updated_in_place_run_after_run():
    ir = popxl.Ir()
    with ir.main_graph:
        v, w = _variable(name="v"), _variable(name="w")
        ops.add_(v, popxl.constant(1.0))
        ops.add_(w, v)
    with popxl.Session(ir) as session:
        session.run()
        state = session._state
        assert state is not None
        before = _pointers(session)
        old = list(state.variables.values())
        session.run()
        assert _pointers(session) == before
        assert all(x.is_deleted() for x in old)
        assert _firsts(session, [v, w]) == [2, 3]


def test_only_the_activations_of_one_layer_live_at_a_time():
    """A chain of layers, each an executable of its own, needs memory for one of them."""
    layers = 8
    ir = popxl.Ir()
    with ir.main_graph:
        buffer, x = _buffer(layers), _variable(1)
        _entries(buffer)

        def layer(x, row):
            return ops.tanh(ops.remote_load(buffer, row) * x), row + 1

        row = popxl.constant(0, popxl.int32)
        ops.repeat(ir.create_graph(layer, x, row), layers, x, row)
    session = popxl.Session(ir)
    (segment,) = executables(session)
    memory = segment.memory_analysis()
    assert memory.argument_size_in_bytes == 2 * ENTRY
    assert memory.output_size_in_bytes == ENTRY
    assert temporary_bytes(session) < ENTRY


# ---- what must not be given away ----------------------------------------------------------------
SMALL = 3


def _run(build, runs: int = 2) -> list[list[float]]:
    """Element 0 of the variables that `build(ir)` returns, after each run."""
    ir = popxl.Ir()
    with ir.main_graph:
        variables = build(ir)
    with popxl.Session(ir) as session:
        found = []
        for _ in range(runs):
            session.run()
            found.append(_firsts(session, variables))
    return found


def _small() -> tuple[popxl.RemoteBuffer, list[popxl.Variable]]:
    buffer = _buffer(3, width=SMALL)
    return buffer, _entries(buffer)


def test_a_variable_that_was_stored_may_change_afterwards():
    def build(ir):
        buffer, (first, *_) = _small()
        v = _variable(width=SMALL)
        ops.remote_store(buffer, 0, v)
        ops.add_(v, popxl.constant(1.0))
        return first, v

    assert _run(build) == [[0, 1], [1, 2]]


def test_a_variable_that_is_stored_after_a_change_changes_in_the_next_run():
    def build(ir):
        buffer, (first, *_) = _small()
        v = _variable(width=SMALL)
        ops.add_(v, popxl.constant(1.0))
        ops.remote_store(buffer, 0, v)
        ops.add_(v, popxl.constant(10.0))
        return first, v

    assert _run(build, 3) == [[1, 11], [12, 22], [23, 33]]


def test_a_variable_stored_in_another_entry_each_run_leaves_the_others():
    def build(ir):
        buffer, entries = _small()
        v, at = _variable(10, width=SMALL), popxl.variable(0, popxl.int32)
        ops.add_(v, popxl.constant(1.0))
        ops.remote_store(buffer, at, v)
        ops.add_(at, popxl.constant(1, popxl.int32))
        return *entries, v

    assert _run(build) == [[11, 2, 3, 11], [11, 12, 3, 12]]


def test_a_value_stored_twice_gives_each_entry_its_own_memory():
    def build(ir):
        buffer, entries = _small()
        x = ops.remote_load(buffer, 2) * 2.0
        ops.remote_store(buffer, 0, x)
        ops.remote_store(buffer, 1, x)
        y = ops.remote_load(buffer, 0)
        ops.remote_store(buffer, 0, y + 1.0)
        return entries

    assert _run(build) == [[7, 6, 3], [7, 6, 3]]


def test_an_entry_copied_to_another_stays_when_the_first_changes():
    def build(ir):
        buffer, entries = _small()
        ops.remote_store(buffer, 1, ops.remote_load(buffer, 0))
        x = ops.remote_load(buffer, 0)
        ops.remote_store(buffer, 0, x + 1.0)
        return entries

    assert _run(build) == [[2, 1, 3], [3, 2, 3]]


def test_an_entry_copied_to_another_buffer_stays_when_the_first_changes():
    def build(ir):
        buffer, entries = _small()
        other, copies = _small()
        ops.remote_store(other, 2, ops.remote_load(buffer, 0))
        x = ops.remote_load(buffer, 0)
        ops.remote_store(buffer, 0, x + 1.0)
        return entries[0], copies[2]

    assert _run(build) == [[2, 1], [3, 2]]


def test_an_entry_loaded_into_a_variable_stays_when_the_variable_changes():
    def build(ir):
        buffer, (first, second, _) = _small()
        v, w = _variable(width=SMALL), _variable(name="w", width=SMALL)
        ops.add_(v, popxl.constant(1.0))
        ops.add_(w, v)
        ops.remote_store(buffer, 1, v)
        ops.remote_load_(buffer, 0, v)
        return first, second, v, w

    assert _run(build, 3) == [[1, 1, 1, 1], [1, 2, 1, 3], [1, 2, 1, 5]]


def test_an_entry_carried_by_a_loop_stays():
    """The loop's first iteration is given what the entry holds, and gives its memory away."""

    def build(ir):
        buffer, entries = _small()
        x = ops.remote_load(buffer, 0)
        row = popxl.constant(1, popxl.int32)

        def body(x, row):
            return ops.remote_load(buffer, row) + x, row + 1

        y, _ = ops.repeat(ir.create_graph(body, x, row), 2, x, row)
        v = _variable(width=SMALL)
        ops.var_updates.copy_var_update_(v, y + x)
        return *entries, v

    assert _run(build) == [[1, 2, 3, 7]] * 2


def test_two_loads_of_an_entry_of_which_one_is_stored_back():
    def build(ir):
        buffer, entries = _small()
        x = ops.remote_load(buffer, 0)
        y = ops.remote_load(buffer, 0)
        ops.remote_store(buffer, 0, y + 1.0)
        v = _variable(width=SMALL)
        ops.add_(v, x)
        return entries[0], v

    assert _run(build, 3) == [[2, 1], [3, 3], [4, 6]]


def test_a_load_before_a_loop_that_stores_to_the_same_entry():
    def build(ir):
        buffer, entries = _small()
        first, row = ops.remote_load(buffer, 0), popxl.constant(0, popxl.int32)

        def body(row, total: popxl.TensorByRef):
            x = ops.remote_load(buffer, row)
            total += x
            ops.remote_store(buffer, row, x + 10.0)
            return row + 1

        total, v = _variable(name="total", width=SMALL), _variable(width=SMALL)
        ops.repeat(ir.create_graph(body, row, total), 3, row, total)
        ops.add_(v, first)
        return *entries, total, v

    assert _run(build) == [[11, 12, 13, 6, 1], [21, 22, 23, 42, 12]]


def test_a_value_that_a_loop_consumes_can_be_used_afterwards():
    """A value starts the loop, is an invariant of it, and is used after it."""

    def build(ir):
        buffer, entries = _small()
        x = _variable(1, name="x", width=SMALL)
        start, row = x * 2.0, popxl.constant(0, popxl.int32)

        def body(x, row, w):
            y = x + ops.remote_load(buffer, row) * w
            ops.remote_store(buffer, row, y)
            return y, row + 1

        graph = ir.create_graph(body, start, row, start)
        y, _ = ops.repeat(graph, 3, start, row, start)
        v = _variable(width=SMALL)
        ops.var_updates.copy_var_update_(v, start + y * 100.0)
        return *entries, x, v

    first = [4, 8, 14]  # 2 + 1 * 2, + 2 * 2, + 3 * 2
    second = [2 + 4 * 2, 10 + 8 * 2, 26 + 14 * 2]
    assert _run(build) == [[*first, 1, 1402], [*second, 1, 5402]]


def test_an_input_that_a_called_graph_changes_stays_the_caller_s():
    def build(ir):
        buffer, entries = _small()

        def body(x, row):
            y = x * 1.0
            ops.add_(y, ops.remote_load(buffer, row))
            ops.remote_store(buffer, row, y)
            return y

        x = _variable(1, name="x", width=SMALL)
        start = x * 2.0
        graph = ir.create_graph(body, start, popxl.constant(0, popxl.int32))
        a = ops.call(graph, start, 0)[0]
        b = ops.call(graph, start, 1)[0]
        v = _variable(width=SMALL)
        ops.var_updates.copy_var_update_(v, start * 100.0 + a * 10.0 + b)
        return *entries, x, v

    assert _run(build, 1) == [[3, 4, 3, 1, 234]]


def test_an_output_returned_twice_is_two_values():
    def build(ir):
        buffer, _ = _small()
        x, row = _variable(1, name="x", width=SMALL), popxl.constant(0, popxl.int32)

        def body(x, z, row):
            y = ops.remote_load(buffer, row) + x + z
            return y, y, row + 1

        y, z, _ = ops.repeat(ir.create_graph(body, x, x, row), 3, x, x, row)
        ops.add_(y, popxl.constant(5.0))
        v, w = _variable(width=SMALL), _variable(name="w", width=SMALL)
        ops.var_updates.copy_var_update_(v, y)
        ops.var_updates.copy_var_update_(w, z)
        return x, v, w

    # 1 + 1 + 1 = 3, 2 + 3 + 3 = 8, 3 + 8 + 8 = 19
    assert _run(build) == [[1, 24, 19]] * 2


def test_carried_values_may_change_places():
    def build(ir):
        buffer, entries = _small()
        p, q = (_variable(i, name="pq"[i], width=SMALL) for i in range(2))

        def body(x, z, row):
            ops.remote_store(buffer, row, x)
            return z, x, row + 1

        row = popxl.constant(0, popxl.int32)
        x, z, _ = ops.repeat(ir.create_graph(body, p, q, row), 3, p, q, row)
        ops.add_(x, popxl.constant(5.0))
        v, w = _variable(width=SMALL), _variable(name="w", width=SMALL)
        ops.var_updates.copy_var_update_(v, x)
        ops.var_updates.copy_var_update_(w, z)
        return *entries, p, q, v, w

    assert _run(build) == [[0, 1, 0, 0, 1, 6, 0]] * 2


@pytest.mark.parametrize("how", ["call", "loop", "branch"])
def test_an_input_that_a_graph_returns_is_still_the_caller_s(how):
    """Input and output are the same memory: the last use of one is not that of the other."""

    def build(ir):
        buffer, _ = _small()
        at = popxl.variable(2, popxl.int32)
        x = _variable(1, name="x", width=SMALL) * 2.0
        loaded = ops.remote_load(buffer, at)  # waits for a number: `x` is computed before

        def keep(x):
            ops.remote_store(buffer, 0, ops.tanh(ops.remote_load(buffer, 2)))
            return x

        graph = ir.create_graph(keep, x)
        if how == "branch":
            (y,) = ops.conditional(popxl.constant(True), graph, graph, [x], [x])
        else:
            (y,) = ops.call(graph, x) if how == "call" else ops.repeat(graph, 2, x)
        v, w = _variable(name="v", width=SMALL), _variable(name="w", width=SMALL)
        ops.var_updates.copy_var_update_(v, x * 3.0 + loaded)
        ops.remote_store(buffer, 1, v)
        ops.var_updates.copy_var_update_(w, y * 5.0 + ops.remote_load(buffer, 1))
        return v, w

    assert _run(build) == [[9, 19]] * 2


@pytest.mark.parametrize("stored", [False, True], ids=["loaded", "stored"])
@pytest.mark.parametrize("how", ["loop", "branch"])
def test_an_entry_s_value_that_a_graph_may_return_stays_when_the_entry_changes(how, stored):
    """A returned value shares the entry's memory, which its load must not donate."""

    def build(ir):
        (buffer, entries), (other, _) = _small(), _small()
        x = ops.remote_load(buffer, 1)
        if stored:
            x = _variable(1, name="x", width=SMALL) * 2.0
            ops.remote_store(buffer, 1, x)

        def use_other():
            ops.remote_store(other, 0, ops.tanh(ops.remote_load(other, 2)))

        def keep(x):
            use_other()
            return x

        def swap(x, y):
            use_other()
            return y, x

        if how == "branch":
            graphs = ir.create_graph(keep, x), ir.create_graph(lambda x: x * 7.0, x)
            (y,) = ops.conditional(popxl.constant(True), *graphs, [x], [x])
        else:
            zero = _variable(name="zero", width=SMALL) * 1.0
            y, _ = ops.repeat(ir.create_graph(swap, x, zero), 2, x, zero)
        ops.remote_store(buffer, 1, ops.remote_load(buffer, 1) + 1.0)
        w = _variable(name="w", width=SMALL)
        ops.var_updates.copy_var_update_(w, y * 5.0 + ops.remote_load(buffer, 1))
        return entries[1], w

    assert _run(build) == [[3, 13], [3, 13] if stored else [4, 19]]
