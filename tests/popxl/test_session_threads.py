"""Sessions in threads: each thread has one of its own, of programs and folders that they share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._storage.scratch_files import ScratchFolder
from popxl.errors import DiskError, popart_exception
from tests.popxl.on_disk import ROWS, program
from tests.popxl.programs import store, together


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# ---- values -------------------------------------------------------------------------------------
def test_sessions_of_a_program_do_not_get_each_other_s_values(hasty):
    def use(session: popxl.Session, variables: list[popxl.Variable], value: float) -> None:
        for v in variables:
            session.write_variable_data(v, np.full(v.shape, value, np.float32))
        with session:
            pass
        for v in variables:
            assert set(session.read_variable_data(v)) == {value}
            assert set(session.get_tensor_data(v)) == {value}

    for _ in range(4):
        ir = popxl.Ir()
        with ir.main_graph:
            variables = [popxl.variable(np.zeros(20_000, np.float32)) for _ in range(25)]
        sessions = [popxl.Session(ir), popxl.Session(ir)]
        together(*(partial(use, s, variables, i + 1.0) for i, s in enumerate(sessions)))


def test_a_session_reads_what_another_shows_and_changes(hasty):
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(np.zeros(200_000, np.float32))
    first = popxl.Session(ir)
    live = first.get_tensor_data(v)
    second = popxl.Session(ir)  # begins with the first one's array

    def change() -> None:
        for i in range(20):
            first.write_variable_data(v, np.full(v.shape, i, np.float32))

    def read() -> None:
        for _ in range(20):
            assert set(second.read_variable_data(v)) == {0}

    together(change, read)
    assert set(live) == {19}
    assert set(second.get_tensor_data(v)) == {0}


# ---- programs -----------------------------------------------------------------------------------
def test_sessions_of_a_program_are_made_at_the_same_time(hasty):
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(np.zeros(3, np.float32))
        body = ir.create_graph(lambda x, y: ops.sin(x) + y, v, v)
        (y,) = ops.repeat(body, 3, v, v + 1.0)
        out = store(y)
    found: list[np.ndarray] = []

    def run() -> None:
        with popxl.Session(ir) as session:
            found.append(session.run()[out])

    together(run, run, run)
    expected = np.zeros(3)
    for _ in range(3):
        expected = np.sin(expected) + 1
    for result in found:
        np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_a_session_runs_in_one_thread_at_a_time():
    ir, refused = popxl.Ir(), list[BaseException]()
    with ir.main_graph:
        out = store(ops.identity(popxl.variable(1.0)))
    with popxl.Session(ir) as session:

        def run_again(*args: object) -> object:
            def again() -> None:
                with pytest.raises(popart_exception, match="runs already, in another thread") as e:
                    session.run()
                refused.append(e.value)

            together(again)
            return call(*args)

        call = session._program._call_segment
        session._program._call_segment = run_again
        assert session.run()[out] == 1.0
        assert refused
        session._program._call_segment = call
        assert session.run()[out] == 1.0


# ---- folders ------------------------------------------------------------------------------------
def test_threads_open_and_leave_one_folder(tmp_path, hasty):
    def use() -> None:
        for _ in range(40):
            ScratchFolder.open_shared(tmp_path).close()

    together(use, use, use)
    assert not list(tmp_path.iterdir())
    assert (tmp_path, 0) not in ScratchFolder._instances


def test_a_folder_that_cannot_be_cleared_is_free_again(tmp_path, monkeypatch):
    def refuses(self: ScratchFolder) -> bool:
        raise PermissionError(13, "no")

    with monkeypatch.context() as patch:
        patch.setattr(ScratchFolder, "_supports_direct_io", refuses)
        with pytest.raises(DiskError, match="cannot be cleared"):
            ScratchFolder.open_shared(tmp_path)
    ScratchFolder.open_shared(tmp_path).close()


def test_programs_in_threads_share_a_folder(tmp_path, hasty, cached):
    reference, rows = program(0)
    initial = [np.copy(v._data) for v in rows]
    with popxl.Session(reference) as session:
        session.run(), session.run()
        expected = [session.read_variable_data(v) for v in rows]
    programs = [program(ROWS - 2) for _ in range(2)]
    sessions = [popxl.Session(ir, disk=tmp_path) for ir, _ in programs]

    def use(session: popxl.Session, rows: list[popxl.Variable]) -> None:
        for _ in range(4):
            session.write_variables_data(dict(zip(rows, initial, strict=True)))
            with session:
                session.run(), session.run()
                for v, value in zip(rows, expected, strict=True):
                    np.testing.assert_array_equal(session.read_variable_data(v), value)

    each = zip(sessions, programs, strict=True)
    together(*(partial(use, session, rows) for session, (_, rows) in each))
    assert not list(tmp_path.iterdir())
