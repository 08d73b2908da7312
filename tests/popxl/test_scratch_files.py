"""Entries of remote buffers in files: the same bits, little memory, and what can go wrong."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._compile import platforms
from popxl._devices.mesh import create_per_replica_sharding, replica_mesh
from popxl._schedule.lookahead import LookaheadEvent
from popxl._schedule.schedule import Load, Store
from popxl._storage import disk_queue, scratch_files
from popxl._storage.entry_memory import EntryMemory
from popxl.errors import DiskError
from tests.popxl.on_disk import ROWS, SIZE, files_in, program
from tests.popxl.system_calls import refuse_fallocate
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached")
KINDS = ["float32", "float16", "int8", "bfloat16"]


def values_of(folder: Path | None, on_disk: int, *given: object) -> list[np.ndarray]:
    """The variables after three runs."""
    ir, rows = program(on_disk, *given)
    with popxl.Session(ir, "cpu", disk=folder) as session:
        for _ in range(3):
            session.run()
        return [session.read_variable_data(row) for row in rows]


SOME = {("float32", ROWS), ("int8", 2), ("bfloat16", 99)}


@pytest.mark.parametrize(
    ("dtype", "on_disk", "replicas"),
    [
        (kind, *split) if (kind, split[0]) in SOME else slow(kind, *split)
        for split in [(ROWS, 1), (2, 1), (99, 2)]
        for kind in KINDS
    ],
)
def test_the_bits_are_those_of_memory(tmp_path, dtype, on_disk, replicas):
    given = replicas, popxl.dtype.from_name(dtype)
    for found, wanted in zip(
        values_of(tmp_path, on_disk, *given), values_of(None, 0, *given), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    assert not list(tmp_path.iterdir())


def test_without_direct_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch_files.ScratchFolder, "_supports_direct_io", lambda self: False)
    for found, wanted in zip(values_of(tmp_path, ROWS), values_of(None, 0), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_what_is_slow_to_be_written_comes_from_memory(tmp_path, monkeypatch):
    write = scratch_files.ScratchFile.write

    def slowly(self: scratch_files.ScratchFile, *args: object) -> None:
        time.sleep(0.01)
        write(self, *args)

    monkeypatch.setattr(scratch_files.ScratchFile, "write", slowly)
    monkeypatch.setattr(disk_queue, "WRITE_BEHIND_BYTES", 5 * 4096)
    for found, wanted in zip(values_of(tmp_path, ROWS), values_of(None, 0), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("runs", [0, 1])
def test_runs_read_ahead(tmp_path, runs):
    """Threads read entries before their loads; the schedule tells the first loads of a run."""
    ir, _ = program(ROWS, size=2**16)
    asked: list[bool] = []
    taken = disk_queue.DiskQueue.pop_read_ahead

    def noted(self: disk_queue.DiskQueue, *key: object) -> object:
        found = taken(self, *key)
        asked.append(found is not None)
        return found

    with popxl.Session(ir, "cpu", disk=tmp_path) as session, pytest.MonkeyPatch.context() as patch:
        for _ in range(runs):
            session.run()
        session._state.disk_queue.wait_all()
        patch.setattr(disk_queue.DiskQueue, "pop_read_ahead", noted)
        before = session.disk_traffic.read
        session.run()
        assert sum(asked) >= ROWS
        buffers = 1 + min(runs, 1)  # what nothing was stored to is no file's
        assert session.disk_traffic.read - before >= buffers * ROWS * 2**18


@pytest.mark.parametrize("moves", [False, True])
def test_reads_ahead_follow_the_order_of_each_run(tmp_path, monkeypatch, moves):
    """The order depends on a scalar of the devices, which differs from the run before."""
    if moves:
        monkeypatch.setattr(platforms.Cpu, "host_memory", "pinned_host")
    size = 2**20
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((size,), popxl.float32, ROWS)
        buffer.on_disk = ROWS
        for i in range(ROWS):
            popxl.remote_variable(np.full(size, i + 1, np.float32), buffer, i)
        flag, out = (popxl.h2d_stream((), popxl.bool, "flag"),
                     popxl.d2h_stream((), popxl.float32, "out"))  # fmt: skip

        def add(row: popxl.Tensor, total: popxl.Tensor, step: int) -> tuple[popxl.Tensor, ...]:
            return row + step, total * 2 + ops.remote_load(buffer, row)[0]

        def rows(first: int, step: int, total: popxl.Tensor) -> popxl.Tensor:
            start = popxl.constant(first, popxl.int32)
            body = ir.create_graph(partial(add, step=step), start, total)
            return ops.repeat(body, ROWS, start, total)[1]

        total = popxl.constant(0, popxl.float32)
        down = ir.create_graph(partial(rows, 0, 1), total)
        up = ir.create_graph(partial(rows, ROWS - 1, -1), total)
        (total,) = ops.conditional(ops.host_load(flag), up, down, [total], [total])
        ops.host_store(out, total)
    late = noted_late(monkeypatch)
    with popxl.Session(ir, "cpu", disk=tmp_path) as session:
        session._state.disk_queue.wait_all()
        for upwards in (False, False, True, False, True, True, False):
            late.clear()
            order = range(ROWS, 0, -1) if upwards else range(1, ROWS + 1)
            wanted = sum(value * 2**i for i, value in enumerate(reversed(order)))
            assert session.run({flag: np.bool_(upwards)})[out] == wanted
            assert late.count(True) <= 1, upwards  # the first, which was asked for at once


def noted_late(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns, for each load of an entry on disk, True if its read had not been started."""
    late: list[bool] = []
    load = disk_queue.EntryFile.load

    def noted(self: disk_queue.EntryFile, index: int, donates: bool = False) -> object:
        late.append((self, index) not in self.disk_queue._pending_reads and self.is_written(index))
        return load(self, index, donates)

    monkeypatch.setattr(disk_queue.EntryFile, "load", noted)
    return late


@pytest.mark.parametrize("moves", [False, True])
def test_a_session_that_was_left_holds_nothing(tmp_path, monkeypatch, moves):
    if moves:
        monkeypatch.setattr(platforms.Cpu, "host_memory", "pinned_host")
    size = 2**18
    ir, _ = program(ROWS - 1, size=size)
    session = popxl.Session(ir, "cpu", disk=tmp_path)
    taken = []
    for _ in range(12):
        with session:
            session.run()
            state = session._state
            held = [weakref.ref(x) for x in (state, state.disk_queue, *state.entries.values())]
        del state
        gc.collect()
        assert [ref() for ref in held] == [None] * len(held)
        taken.append(resident_memory())
    leak = 8 * ROWS * 4 * size  # of one of the two buffers, in the last eight sessions
    assert min(taken[-4:]) - taken[3] < leak / 2  # the heap's own size moves, too


def resident_memory() -> int:
    """Bytes that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_zeros_are_not_written(tmp_path):
    """And take the place of what was there."""
    ir, rows = program(ROWS)
    zeros = np.zeros(SIZE, np.float32)
    with popxl.Session(ir, "cpu", disk=tmp_path) as session:
        session._state.disk_queue.wait_all()
        written = session.disk_traffic.written
        session.write_variables_data(dict.fromkeys(rows[:3], lambda: zeros))
        session._state.disk_queue.wait_all()
        assert session.disk_traffic.written == written
        for row in rows[:3]:
            np.testing.assert_array_equal(session.read_variable_data(row), zeros)
        assert session.read_variable_data(rows[3]).any()


def test_nothing_is_read_ahead_past_a_store(tmp_path):
    """No read starts while a store is pending and the file still has the old value."""
    behind = disk_queue.DiskQueue.open_shared(tmp_path, 0)
    file = disk_queue.EntryFile(behind, 2, memory_of_entries(behind))
    buffer = object()
    held = SimpleNamespace(may_be_on_disk=True, disk_slot=lambda index: (file, index))
    steps = Store(value=0, buffer=buffer, entry_index=0), Load(out=0, buffer=buffer, entry_index=0)
    for value in (1.0, 2.0, 3.0):
        with behind.run_context((LookaheadEvent(step, 0) for step in steps), {buffer: held}):
            assert not behind._pending_reads
            file.store(0, jnp.full(1024, value))
            assert not behind._pending_reads
            behind.advance(Store, buffer, 0)
            with behind.write_done:
                behind.write_done.wait_for(lambda: not behind.pending_write_bytes)
            behind.advance(Load, buffer, 0)
            found, is_own = file.load(0)
            assert (float(found[0]), is_own) == (value, True)
    file.close()
    behind.close()


def memory_of_entries(of: disk_queue.DiskQueue) -> EntryMemory:
    """Memory layout of entries of 1,024 numbers on one device."""
    sharding = create_per_replica_sharding(replica_mesh("cpu", 1))
    return EntryMemory((1024,), 1024, np.float32, sharding, of.scratch, of.buffer_pool)


def pointer(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


def test_what_is_written_gives_its_memory_to_what_is_read(tmp_path):
    """Unless somebody still has the array; and programs take it without a copy."""
    behind = disk_queue.DiskQueue.open_shared(tmp_path, 0)
    file = disk_queue.EntryFile(behind, 3, memory_of_entries(behind))
    kept, array = (jax.block_until_ready(jnp.full(1024, value)) for value in (1.0, 2.0))
    before = pointer(kept), pointer(array)
    file.store(0, kept)
    with file._locks[1]:  # it is written when nobody has the array any more
        file.store(1, array)
        del array
    behind.wait_all()
    end = time.monotonic() + 60
    while not behind.buffer_pool._nbytes and time.monotonic() < end:  # the thread may be late
        time.sleep(0.01)
    found, is_own = file.load(0, donates=True)
    assert (pointer(found), float(found[0]), is_own) == (before[1], 1.0, True)
    assert kept[0] == 1.0
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)(found)
    assert (pointer(donated), float(donated[0])) == (before[1], 2.0)
    other, _ = file.load(1, donates=True)
    assert pointer(other) not in before
    assert other[5] == 2.0
    file.close()
    behind.close()


def test_programs_that_still_read_keep_the_memory(tmp_path):
    """A read into the memory waits for the programs that use it."""
    behind = disk_queue.DiskQueue.open_shared(tmp_path, 0)
    memory = memory_of_entries(behind)
    array, ones = jnp.full(1024, 0.5), jnp.ones((1000, 1000))

    @jax.jit
    def late(x: jax.Array, ones: jax.Array) -> jax.Array:
        place = (ones @ ones @ ones).max() % 1024
        return x[place.astype(jnp.int32)]

    found = late.lower(array, ones).compile()(array, ones)
    assert not found.is_ready()
    memory.release(array)
    (view,), _ = memory.allocate(donates=True)
    view[:] = 255
    assert found == 0.5
    behind.close()


@pytest.mark.parametrize("where", ["request", "array"])
def test_who_waits_for_an_entry_hears_what_went_wrong(where):
    def fails() -> jax.Array:
        raise MemoryError(where)

    found: Future[jax.Array] = Future()
    requests = [lambda: None, fails if where == "request" else lambda: None]
    reading = disk_queue._PendingRead(found, fails, requests)
    for request in requests:
        assert not found.done()
        reading.run_request(request)
    with pytest.raises(MemoryError, match=where):
        found.result(timeout=0)


def test_entries_on_disk_take_no_memory(tmp_path):
    ir, _ = program(4)
    with popxl.Session(ir, "cpu", disk=tmp_path) as session:
        session.run()
        assert session.remote_bytes() == 2 * 2 * 4 * SIZE


def test_another_session_reads_what_is_borrowed(tmp_path):
    """Without a copy; what it stores is its own."""
    results = []
    for on_disk in (0, 2):
        ir, rows = program(on_disk)
        other, others = program(0)
        with popxl.Session(ir, "cpu", disk=tmp_path) as session:
            session.run()
            before = [session.read_variable_data(row) for row in rows]
            borrower = popxl.Session(other, "cpu")
            borrower.write_variables_data(
                {b: session.share_variable(row) for b, row in zip(others, rows, strict=True)}
            )
            with borrower:
                assert borrower.remote_bytes() == 0
                borrower.run()
                results.append([borrower.read_variable_data(row) for row in others])
            for row, value in zip(rows, before, strict=True):
                np.testing.assert_array_equal(session.read_variable_data(row), value)
            session.run()
    alone, rows = program(0)
    with popxl.Session(alone, "cpu") as session:
        session.write_variables_data(dict(zip(rows, before, strict=True)))
        session.run()
        wanted = [session.read_variable_data(row) for row in rows]
    for found in results:
        np.testing.assert_array_equal(found, wanted)


def test_only_variables_are_borrowed():
    ir, _ = program(0)
    with popxl.Session(ir, "cpu") as session, pytest.raises(TypeError, match="variables"):
        session.share_variable(ir.main_graph)


def test_entries_that_stay_on_the_device_are_in_no_file(tmp_path):
    """Results do not depend on which entries stay on the device."""
    found = []
    for on_disk, resident in ((0, 0), (2, {1, ROWS - 1}), (ROWS, 3)):
        ir, rows = program(on_disk)
        (buffer, *_) = ir._buffers
        buffer.resident = resident
        assert on_disk != 2 or list(buffer.on_disk_entries) == [ROWS - 3, ROWS - 2]
        with popxl.Session(ir, "cpu", disk=tmp_path) as session:
            session.run()
            found.append([session.read_variable_data(row) for row in rows])
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


# ---- what can go wrong --------------------------------------------------------------------------
@pytest.mark.parametrize("index", [-1, ROWS, ROWS + 1, 2**30])
@pytest.mark.parametrize("on_disk", [0, 2, ROWS])
def test_an_entry_past_the_end_that_only_devices_know(tmp_path, on_disk, index):
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((SIZE,), popxl.float32, ROWS)
        buffer.on_disk = on_disk
        at, out = popxl.h2d_stream((), popxl.int32), popxl.d2h_stream((SIZE,), popxl.float32)
        ops.host_store(out, ops.remote_load(buffer, ops.host_load(at)))
    with popxl.Session(ir, "cpu", disk=tmp_path) as session:
        assert not session.run({at: np.int32(ROWS - 1)})[out].any()
        with pytest.raises(IndexError, match=rf"uses entry {index} of .* has {ROWS} entries"):
            session.run({at: np.int32(index)})


def test_a_folder_is_needed():
    ir, _ = program(1)
    with pytest.raises(ValueError, match="disk=FOLDER"), popxl.Session(ir, "cpu"):
        pass


def test_a_full_disk(tmp_path):
    """A limit on the size of files, which the system checks where it checks for room."""
    ir, _ = program(ROWS, size=2**16)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(DiskError, match="cannot have room for") as error:
            popxl.Session(ir, "cpu", disk=tmp_path).__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) in str(error.value)
    assert len(str(error.value)) < 300 + len(str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "what"), [("pwritev", "written"), ("preadv", "read")])
def test_a_broken_disk(tmp_path, monkeypatch, name, what):
    ir, _ = program(ROWS, size=2**16)

    def broken(*args: object) -> int:
        raise OSError(5, "Input/output error")

    def run() -> None:
        with popxl.Session(ir, "cpu", disk=tmp_path) as session:
            session.run()
            session._state.disk_queue.wait_all()
            monkeypatch.setattr(os, name, broken)
            session.run()
            session._state.disk_queue.wait_all()
            session.run()

    with pytest.raises(DiskError, match=f"cannot be {what}.*Input/output error"):
        run()


def flip_a_bit(tmp_path: Path, largest: int) -> None:
    """In what is stored, somewhere."""
    (path, *_) = files_in(tmp_path)
    with path.open("r+b") as file:
        at = scratch_files.LEAD + largest // 2
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("size", "request_size"),
    [(SIZE, scratch_files.REQUEST), (SIZE, 4096), slow(2**22, scratch_files.REQUEST)],
)  # of one request, and of three
def test_a_flipped_bit_stops_the_run(tmp_path, monkeypatch, size, request_size, direct):
    monkeypatch.setattr(scratch_files, "REQUEST", request_size)
    if not direct:
        monkeypatch.setattr(scratch_files.ScratchFolder, "_supports_direct_io", lambda self: False)
    ir, _ = program(ROWS, size=size)
    with popxl.Session(ir, "cpu", disk=tmp_path, weights_to_host_on_exit=False) as session:
        session.run()
        session._state.disk_queue.wait_all()
        flip_a_bit(tmp_path, 4 * size)
        with pytest.raises(DiskError, match="other bytes than were written") as error:
            session.run()
        assert str(tmp_path) in str(error.value)
        assert not session.is_attached


def test_a_flipped_bit_is_not_saved(tmp_path):
    ir, rows = program(ROWS)
    with popxl.Session(ir, "cpu", disk=tmp_path, weights_to_host_on_exit=False) as session:
        session.run()
        session._state.disk_queue.wait_all()
        flip_a_bit(tmp_path, 4 * SIZE)
        with pytest.raises(DiskError, match="other bytes than were written"):
            session.read_variable_data(rows[0])
        assert session.read_variable_data(rows[1]).any()


def test_a_write_that_was_dropped_stops_the_run(tmp_path, monkeypatch):
    ir, _ = program(ROWS)
    with popxl.Session(ir, "cpu", disk=tmp_path, weights_to_host_on_exit=False) as session:
        session.run()
        session._state.disk_queue.wait_all()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", lambda _, parts, at: sum(part.size for part in parts))
            session.run()
            session._state.disk_queue.wait_all()
        with pytest.raises(DiskError, match="other bytes than were written"):
            session.run()


RUN = """
import sys, time
from pathlib import Path
import popxl
from tests.popxl.on_disk import program
ir, _ = program(6)
with popxl.Session(ir, "cpu", disk=sys.argv[1]) as session:
    session.run()
    print("ready", flush=True)
    time.sleep(60)
"""


def test_two_runs_cannot_share_a_folder_and_a_killed_one_leaves_nothing(tmp_path):
    ir, _ = program(ROWS)
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "ready\n"
            with pytest.raises(DiskError, match="in use by another run"):
                popxl.Session(ir, "cpu", disk=tmp_path).__enter__()
        finally:
            other.send_signal(signal.SIGKILL)
    assert [path.name for path in tmp_path.glob("*/*")] == ["lock"]
    values_of(tmp_path, ROWS)
    assert not list(tmp_path.iterdir())


def test_files_that_a_network_file_system_renamed_are_removed(tmp_path):
    """When its host went down, as NFS renames what is open; a folder among them is left alone."""
    folder = tmp_path / "popxl-scratch-0"
    (folder / ".nfs0001" / "x").mkdir(parents=True)
    (folder / ".nfs0002").write_bytes(bytes(4096))
    scratch = scratch_files.ScratchFolder(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [".nfs0001", "lock"]
    scratch.close()


def test_an_error_in_one_of_two_processes_leaves_no_files(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PAIR)
    command = [sys.executable, "-m", "popdist.run", "--processes", "2", sys.executable,
               str(program), str(tmp_path / "disk")]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 1, ended.stderr
    assert "the second fails" in ended.stderr
    assert ended.stdout.count("has files") == 2
    left = [path for path in (tmp_path / "disk").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in left) == 0, left


PAIR = """
import sys
from pathlib import Path
import popdist
import popxl
from tests.popxl.on_disk import files_in, program
popdist.init()
ir, _ = program(6, replicas=2)
with popxl.Session(ir, "cpu", disk=sys.argv[1]) as session:
    session.run()
    assert files_in(Path(sys.argv[1]))
    print("has files", flush=True)
    popdist.all_gather_object(None)
    if popdist.getInstanceIndex():
        raise RuntimeError("the second fails")
    popdist.all_gather_object(None)
"""


# ---- other file systems -------------------------------------------------------------------------
@pytest.mark.parametrize("reason", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_fallocate(tmp_path, reason):
    """On ext3, and NFS before 4.2, files get their size at once and their blocks later."""
    given, found = np.random.default_rng(0).bytes(10_000), np.zeros(10_000, np.uint8)

    def write_and_read() -> None:
        refuse_fallocate(reason)
        scratch = scratch_files.ScratchFolder(tmp_path)
        file = scratch.create_file(len(given))
        file.write(0, np.frombuffer(given, np.uint8))
        file.read(0, found)
        file.close()
        scratch.close()

    with ThreadPoolExecutor(1) as pool:  # the kernel refuses it to this thread alone
        pool.submit(write_and_read).result()
    assert found.tobytes() == given


def test_blocks_are_there_from_the_start(tmp_path):
    scratch = scratch_files.ScratchFolder(tmp_path)
    file = scratch.create_file(2**20)
    assert os.fstat(file._file).st_blocks * 512 >= 2**20
    file.close()
    scratch.close()


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_requests_that_the_kernel_cannot_begin_are_tried_again(tmp_path, monkeypatch, name):
    usual, refused = getattr(os, name), []

    def busy(*args: object) -> int:
        if len(refused) % 3 != 2:
            refused.append(args)
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        refused.append(None)
        return usual(*args)

    monkeypatch.setattr(os, name, busy)
    for found, wanted in zip(values_of(tmp_path, 2), values_of(None, 0), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert len(refused) > 3


def test_a_session_says_for_how_long_the_disk_has_not_answered(tmp_path, monkeypatch):
    ir, _ = program(ROWS)
    usual, answers = os.pwritev, threading.Event()

    def hangs(*args: object) -> int:
        answers.wait()
        return usual(*args)

    with popxl.Session(ir, "cpu", disk=tmp_path) as session:
        session._state.disk_queue.wait_all()
        silence = session.disk_idle_clock()
        assert silence() == 0
        monkeypatch.setattr(os, "pwritev", hangs)
        with ThreadPoolExecutor(1) as thread:  # the run may load what waits behind these writes
            run = thread.submit(session.run)
            try:
                end = time.monotonic() + 100
                while silence() <= 0.1 and time.monotonic() < end:
                    time.sleep(0.02)
                assert 0.1 < silence() < 100
            finally:
                answers.set()  # else the run, and leaving the session, would wait for ever
            run.result()
        session._state.disk_queue.wait_all()
        assert silence() == 0


def test_a_disk_that_stays_busy_is_an_error(tmp_path, monkeypatch):
    def busy(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    scratch = scratch_files.ScratchFolder(tmp_path)
    file = scratch.create_file(4096)
    monkeypatch.setattr(os, "pwritev", busy)
    monkeypatch.setattr(scratch_files, "PATIENCE", 0.05)
    with pytest.raises(DiskError, match="temporarily unavailable"):
        file.write(0, np.zeros(64, np.uint8))
    file.close()
    scratch.close()


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """A soft limit that is reached already."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_buffers_than_the_soft_limit_of_open_files(tmp_path, few_descriptors):
    scratch = scratch_files.ScratchFolder(tmp_path)
    files = [scratch.create_file(4096) for _ in range(100)]
    for file in files:
        file.close()
    scratch.close()


def test_the_hard_limit_of_open_files_is_named(tmp_path, few_descriptors, monkeypatch):
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    scratch, files = scratch_files.ScratchFolder(tmp_path), []
    with pytest.raises(DiskError, match=r"cannot open a file of 131 kB.*\(ulimit -Hn\)"):
        files.extend(scratch.create_file(2**17) for _ in range(100))
    monkeypatch.undo()
    for file in files:
        file.close()
    scratch.close()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1, "1 B"), (999, "999 B"), (999_499, "999 kB"), (999_500, "1 MB"),
     (131_072, "131 kB"), (2**23, "8.39 MB"), (5 * 10**10, "50 GB"), (2 * 10**12, "2 TB")],
)  # fmt: skip
def test_sizes_have_units_that_fit(nbytes, text):
    assert scratch_files._format_bytes(nbytes) == text


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_a_number_of_entries_is_needed(count):
    ir, _ = program(0)
    (buffer, *_) = ir._buffers
    with pytest.raises(ValueError, match="entries on disk"):
        buffer.on_disk = count


def test_the_last_user_may_be_gone_in_a_thread_of_the_disk(tmp_path):
    """The garbage collector can close the queue in a disk thread, after a failed run."""
    ir, rows = program(ROWS)
    with popxl.Session(ir, "cpu", disk=tmp_path) as session:
        session.run()
    traffic = disk_queue.DiskQueue.open_shared(tmp_path, 0)
    traffic.scratch.pool.submit(traffic.close).result(60)
    del traffic
    with popxl.Session(ir, "cpu", disk=tmp_path) as session:
        session.run()
        assert session.read_variable_data(rows[1]).any()
    end = time.monotonic() + 60
    while list(tmp_path.iterdir()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not list(tmp_path.iterdir())


class Flip:
    """A bit anywhere in the files that is flipped."""

    def __init__(self, random: Random, folder: Path) -> None:
        self.path = random.choice(files_in(folder))
        self.at = random.randrange(self.path.stat().st_size)
        self.bit = 1 << random.randrange(8)
        self.is_of_entry = (
            scratch_files.LEAD
            <= self.at % scratch_files.padded_bytes(4 * SIZE)
            < scratch_files.LEAD + 4 * SIZE
        )
        self.flip()

    def flip(self) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.at)
            (byte,) = file.read(1)
            file.seek(self.at)
            file.write(bytes([byte ^ self.bit]))


@pytest.mark.slow
def test_no_flipped_bit_passes(tmp_path):
    """FLIPS bits, one before variables are read, which is flipped back, or before a run: an error,
    or the right values, where the bit is of no entry, of one that nobody asks for, or of one that
    was read ahead."""
    random, flips, found = Random(34), int(os.environ.get("FLIPS", "200")), 0
    first = np.arange(ROWS * SIZE).reshape(ROWS, SIZE) % 100.0
    second = first + 2 * first  # of m, 0 at first, and x the run makes x - m and x + 2 (x - m)
    third = second + 2 * (second - first)

    def is_told(wanted: np.ndarray) -> bool:
        """Returns True if an error is raised for a row; all other rows must be right."""
        told = False
        for row, right in zip(rows, wanted, strict=True):
            try:
                np.testing.assert_array_equal(session.read_variable_data(row), right)
            except DiskError:
                told = True
        return told

    for _ in range(0, flips, 10):
        ir, rows = program(ROWS)
        with popxl.Session(ir, "cpu", disk=tmp_path, weights_to_host_on_exit=False) as session:
            session.run()
            session._state.disk_queue.wait_all()
            for _ in range(9):
                flip = Flip(random, tmp_path)
                told = is_told(second)
                assert flip.is_of_entry or not told
                found += told
                flip.flip()
                assert not is_told(second)
            flip = Flip(random, tmp_path)
            try:
                session.run()
                assert not is_told(third)
            except DiskError:
                assert flip.is_of_entry
                found += 1
    print(f"{found} of {flips} flipped bits were found; the others changed nothing that was read")
    assert found > flips / 4


@pytest.mark.parametrize("on_disk", [0, ROWS])
def test_weights_from_host_take_the_place_of_what_is_there(tmp_path, on_disk):
    """The state is there once: in memory, and on disk."""
    ir, rows = program(on_disk, size=2**18)
    session, held = popxl.Session(ir, "cpu", disk=tmp_path), []

    def last() -> np.ndarray:
        gc.collect()
        memory = sum(x.nbytes for x in jax.live_arrays())  # with a disk also what is used again
        held.append(_bytes_in(tmp_path) if on_disk else memory)
        return np.full(2**18, 5, np.float32)

    session.write_variable_data(rows[-1], last)
    with session:
        session.run()
        session.weights_from_host()
        expected = np.arange(2**18) % 100  # of the first row
        np.testing.assert_array_equal(session.read_variable_data(rows[0]), expected)
        np.testing.assert_array_equal(session.read_variable_data(rows[-1]), 5)
        assert held[1] < held[0] + 2**20
    assert not list(tmp_path.iterdir())


def _bytes_in(folder: Path) -> int:
    """Bytes of files of a folder that this process has open, also of such without a name."""
    found = 0
    for entry in os.scandir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(entry.path).startswith(f"{folder}/"):
                found += os.stat(entry.path).st_size
    return found
