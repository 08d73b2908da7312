"""Whose values are whose: several sessions of one program, and runs that stop in the middle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import popart_exception
from tests.popxl.programs import store

pytestmark = pytest.mark.usefixtures(
    "cached", "compiled_quickly"
)  # the same programs for each case

KINDS = ["variable", "remote", "sharded", "remote sharded"]


class Counter:
    """A program that adds 1 to `v` in each run, and reads `fixed`; it has two segments."""

    def __init__(self, kind: str = "variable", replicas: int = 1) -> None:
        self.ir = popxl.Ir(replication=replicas)
        zeros = np.zeros(2, np.float32)
        with self.ir.main_graph:
            self.fixed = popxl.variable(np.full(2, 7, np.float32), name="fixed")
            self.entry = popxl.remote_buffer((2,), popxl.float32)
            ops.remote_store(self.entry, 0, self.fixed * 2.0)
            self.between = store(ops.remote_load(self.entry, 0) + 1.0)
            if kind == "variable":
                self.v = popxl.variable(zeros, name="v")
                ops.add_(self.v, popxl.constant(1.0))
            elif kind == "sharded":
                self.v, shard = popxl.replica_sharded_variable(zeros, name="v")
                ops.add_(shard, popxl.constant(1.0))
            else:
                self._in_a_buffer(kind, zeros)

    def _in_a_buffer(self, kind: str, zeros: np.ndarray) -> None:
        if kind == "remote":
            buffer = popxl.remote_buffer((2,), popxl.float32)
            self.v = popxl.remote_variable(zeros, buffer, name="v")
        else:
            buffer = popxl.replica_sharded_buffer((2,), popxl.float32)
            self.v = popxl.remote_replica_sharded_variable(zeros, buffer, name="v")
        ops.remote_store(buffer, 0, ops.remote_load(buffer, 0) + 1.0)

    def session(self, **options: bool) -> popxl.Session:
        return popxl.Session(self.ir, "cpu", **options)

    def value(self, session: popxl.Session) -> float:
        """Returns the value of `v`, which all ways to read it agree on."""
        ways = [
            session.read_variable_data(self.v),
            *(
                np.resize(session.read_variable_shard(self.v, p), 2)
                for p in session.variable_shards(self.v)
            ),
            session.get_tensor_data(self.v),
            session.get_tensors_data([self.v, self.fixed])[self.v],
        ]
        values = {float(x) for way in ways for x in way.reshape(-1)}
        assert len(values) == 1, ways
        return values.pop()


# ---- several sessions of one program ------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_training_one_session_leaves_the_values_of_another_alone(kind):
    program = Counter(kind)
    a, b = program.session(), program.session()
    with a:
        a.run()
        a.run()
        assert (program.value(a), program.value(b)) == (2, 0)
    assert (program.value(a), program.value(b)) == (2, 0)
    with b:
        b.run()
        assert (program.value(a), program.value(b)) == (2, 1)
    assert (program.value(a), program.value(b)) == (2, 1)
    with a:
        a.run()
    assert (program.value(a), program.value(b)) == (3, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [False, True], ids=["once", "entered twice"])
def test_a_session_inside_another(kind, again):
    program = Counter(kind)
    a, b = program.session(), program.session()
    with a:
        if again:
            a.__enter__()
        a.run()
        a.run()
        with b:
            assert program.value(a) == 2
            b.run()
            a.run()
            assert (program.value(a), program.value(b)) == (3, 1)
            assert not program.v.in_sync_with_ipu or program.value(a) == 3
        assert (program.value(a), program.value(b)) == (3, 1)
        a.run()
        if again:
            a.__exit__(None, None, None)
            assert a.is_attached
        a.run()
    assert (program.value(a), program.value(b)) == (5, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_an_inner_session_is_seen_by_none_that_did_not_run(kind):
    program = Counter(kind)
    a, b = program.session(), program.session()
    with a:
        with b:
            b.run()
        assert (program.value(a), program.value(b)) == (0, 1)
        a.run()
        assert program.value(a) == 1
    with b, a:
        a.run()
        b.run()
    assert (program.value(a), program.value(b)) == (2, 2)


def test_a_new_session_begins_with_what_was_brought_to_the_host_last():
    program = Counter()
    first = program.session()
    with first:
        first.run()
        live = first.get_tensor_data(program.v)
        second = program.session()
        assert program.value(second) == 1
        first.run()
    assert live.tolist() == [2, 2]
    assert program.value(second) == 1
    third = program.session()
    with third:
        third.run()
    assert [program.value(s) for s in (first, second, third)] == [2, 1, 3]
    assert live is first.get_tensor_data(program.v)
    assert live.tolist() == [2, 2]
    assert program.value(program.session()) == 3


def test_what_is_written_to_a_session_is_its_own():
    program = Counter()
    a, b = program.session(), program.session()
    mine = a.get_tensor_data(program.v)
    a.write_variable_data(program.v, np.full(2, 5, np.float32))
    b.write_variable_data(program.v, lambda: np.full(2, 9, np.float32))
    assert (program.value(a), program.value(b)) == (5, 9)
    assert mine.tolist() == [5, 5]
    with a, b:
        a.run()
        b.run()
        b.run()
    assert (program.value(a), program.value(b)) == (6, 11)
    assert mine.tolist() == [6, 6]


def test_a_memory_map_is_one_for_all_sessions(tmp_path):
    array = np.lib.format.open_memmap(tmp_path / "v.npy", "w+", np.float32, (2,))
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(array)
        ops.add_(v, popxl.constant(1.0))
    a, b = popxl.Session(ir), popxl.Session(ir)
    for session, expected in ((a, 1), (b, 2), (a, 3)):
        with session:
            session.run()
        assert np.load(tmp_path / "v.npy").tolist() == [expected] * 2
    assert a.get_tensor_data(v) is array
    assert b.get_tensor_data(v) is array


def test_all_replicas_of_several_sessions():
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        v = popxl.variable(np.zeros(3, np.float32), retrieval_mode="all_replicas")
        ops.add_(v, popxl.constant(1.0))
    a, b = popxl.Session(ir), popxl.Session(ir)
    with a:
        a.run()
        with b:
            b.run()
            b.run()
        assert a.get_tensor_data(v).tolist() == [[1] * 3] * 2
    assert b.get_tensor_data(v).tolist() == [[2] * 3] * 2
    assert a.read_variable_data(v).tolist() == [[1] * 3] * 2


def test_a_session_knows_the_variables_that_there_were_when_it_was_made():
    program = Counter()
    before = program.session()
    with program.ir.main_graph:
        late = popxl.variable(np.zeros(2, np.float32), name="late")
        ops.add_(late, popxl.constant(2.0))
    after = program.session()
    with before, after:
        before.run()
        after.run()
    assert (program.value(before), program.value(after)) == (1, 1)
    assert after.get_tensor_data(late).tolist() == [2, 2]
    for use in (before.get_tensor_data, before.read_variable_data, before.variable_shards):
        with pytest.raises(ValueError, match="'late' was created after this session"):
            use(late)
    with pytest.raises(ValueError, match="'late' was created after this session"):
        before.write_variable_data(late, np.zeros(2, np.float32))


# ---- runs that stop in the middle ---------------------------------------------------------------
def _stops(session: popxl.Session, error: type[BaseException], at: int = 1) -> Callable[[], None]:
    """Make segment `at` of the next run raise; returns what makes runs whole again."""
    call, calls = session._program._call_segment, 0

    def failing(segment, arguments):
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise error
        return call(segment, arguments)

    session._program._call_segment = failing  # type: ignore[method-assign]
    return lambda: setattr(session._program, "_call_segment", call)


def _assert_lost(program: Counter, session: popxl.Session) -> None:
    """Checks that no old value is returned, and that unchanged variables keep theirs."""
    for ask in (
        session.get_tensor_data,
        session.read_variable_data,
        lambda v: session.get_tensors_data([program.fixed, v]),
        lambda v: session.read_variable_shard(v, session.variable_shards(v)[0]),
    ):
        with pytest.raises(popart_exception, match="'v' is lost: a run stopped in the middle"):
            ask(program.v)
    assert session.get_tensor_data(program.fixed).tolist() == [7, 7]
    assert session.read_variable_data(program.fixed).tolist() == [7, 7]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("at", [0, 1])
def test_after_a_run_that_stopped_nobody_reads_old_values(kind, error, at):
    program = Counter(kind)
    session = program.session()
    with session:
        session.run()
        restore = _stops(session, error, at)
        with pytest.raises(error):
            session.run()
        restore()
        _assert_lost(program, session)
        for refused in (session.run, session.weights_to_host, session.weights_from_host):
            with pytest.raises(popart_exception, match="a run stopped in the middle.*'v'"):
                refused()
    _assert_lost(program, session)
    with pytest.raises(popart_exception, match="a run stopped in the middle.*'v'"):
        session.__enter__()
    session.write_variable_data(program.v, np.full(2, 3, np.float32))
    with session:
        session.run()
    assert program.value(session) == 4


def test_the_error_that_stopped_a_run_is_the_one_that_is_seen():
    program = Counter()
    session = program.session()

    def interrupted() -> None:
        with session:
            session.run()
            _stops(session, KeyboardInterrupt)
            session.run()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not session.is_attached
    _assert_lost(program, session)
    other = program.session()  # begins with what came to the host last
    assert program.value(other) == 0


def test_a_run_that_stopped_inside_the_block_can_be_mended_there():
    program = Counter("remote")
    with program.session() as session:
        restore = _stops(session, MemoryError)
        with pytest.raises(MemoryError):
            session.run()
        restore()
        session.write_variable_data(program.v, lambda: np.full(2, 8, np.float32))
        assert program.value(session) == 8
        session.weights_from_host()
        session.run()
        assert program.value(session) == 9
        with session:
            session.run()
        assert session.is_attached
    assert program.value(session) == 10


def test_a_program_that_changes_no_variable_loses_none():
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(np.ones(2, np.float32))
        out = store(v + 1.0)
    with popxl.Session(ir) as session:
        restore = _stops(session, KeyboardInterrupt, 0)
        with pytest.raises(KeyboardInterrupt):
            session.run()
        restore()
        assert session.get_tensor_data(v).tolist() == [1, 1]
        session.weights_from_host()
        assert session.run()[out].tolist() == [2, 2]


def test_where_nothing_is_brought_back_a_new_block_begins_with_what_was_written():
    program = Counter()
    session = program.session(weights_to_host_on_exit=False)
    with session:
        restore = _stops(session, MemoryError)
        with pytest.raises(MemoryError):
            session.run()
        restore()
        _assert_lost(program, session)
    assert program.value(session) == 0  # as after any run
    with session:
        session.run()
        assert program.value(session) == 1


def test_a_fault_in_one_session_is_none_in_another():
    program = Counter("remote")
    a, b = program.session(), program.session()
    with a, b:
        b.run()
        _stops(a, MemoryError)
        with pytest.raises(MemoryError):
            a.run()
        b.run()
        _assert_lost(program, a)
        assert program.value(b) == 2
    assert program.value(b) == 2


@pytest.mark.parametrize("kind", ["variable", "remote"])
def test_stopped_while_the_values_come_to_the_host(kind, monkeypatch):
    program = Counter(kind)
    session = program.session()

    def left() -> None:
        with session:
            session.run()
            monkeypatch.setattr(session, "_fetch_variable", _raise_interrupt)

    with pytest.raises(KeyboardInterrupt):
        left()
    assert not session.is_attached
    _assert_lost(program, session)


def test_stopped_while_a_value_goes_to_the_devices():
    program = Counter()

    def interrupted() -> np.ndarray:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return np.full(2, 4, np.float32)

    calls: list[int] = []
    with program.session() as session:
        session.run()
        with pytest.raises(KeyboardInterrupt):
            session.write_variable_data(program.v, interrupted)
        _assert_lost(program, session)
        with pytest.raises(popart_exception, match="what it changes is lost"):
            session.run()
        session.write_variable_data(program.v, interrupted)
        session.run()
        assert program.value(session) == 5


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_weights_that_do_not_come_from_the_host_can_come_again(ir):
    v, w = (popxl.variable(np.zeros(3, np.float32)) for _ in range(2))
    ops.add_(v, popxl.constant(1.0))
    values = [np.ones(3, np.float32)]
    with popxl.Session(ir) as session:
        session.run()
        session.write_variable_data(w, lambda: values[0])
        values.clear()
        with pytest.raises(IndexError):
            session.weights_from_host()
        with pytest.raises(popart_exception, match="call weights_from_host"):
            session.run()
        values.append(np.full(3, 2, np.float32))
        session.weights_from_host()
        session.run()
        np.testing.assert_array_equal(session.read_variable_data(v), np.ones(3))
        np.testing.assert_array_equal(session.read_variable_data(w), np.full(3, 2))
