"""The executable cache: a second start loads the segments that the first compiled."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._compile import executable_cache
from popxl._compile.cache_folder import distrust_reason
from popxl._compile.executable_cache import statistics
from popxl._compile.executable_serialization import LoadedSegment
from popxl._ir.op_registry import define
from popxl.ops._emit import emit
from tests.popxl.compiled import executables, optimised, temporary_bytes

REPLICAS = 8


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache, used by the sessions of the test."""
    monkeypatch.setenv("POPXL_CACHE_DIR", str(tmp_path / "cache"))
    for name in vars(statistics):
        monkeypatch.setattr(statistics, name, 0)
    return tmp_path / "cache"


def _training_like(replicas: int = REPLICAS) -> tuple[popxl.Ir, dict[str, object]]:
    """Plain, unused, remote and sharded variables, streams, a loop, collectives, constants."""
    ir = popxl.Ir(replication=replicas)
    ir.num_host_transfers = 2
    with ir.main_graph:
        x_stream = popxl.h2d_stream((16,), popxl.float32, "x")
        y_stream = popxl.d2h_stream((16,), popxl.float32, "y")
        weight = popxl.variable(np.linspace(0, 1, 16, dtype=np.float32), name="w")
        popxl.variable(np.ones(3, np.float32), name="unused")
        buffer = popxl.remote_buffer((16,), popxl.float32, 4)
        remote = popxl.remote_variable(np.full(16, 2, np.float32), buffer, 1)
        shards = popxl.replica_sharded_buffer((16,), popxl.float32)
        sharded = popxl.remote_replica_sharded_variable(np.arange(16, dtype=np.float32), shards)
        held, held_shard = popxl.replica_sharded_variable(np.arange(16, dtype=np.float32))
        held_shard += 1
        large = popxl.constant(np.arange(2048, dtype=np.float32))
        row = popxl.variable(0, popxl.uint32)

        def step(row: popxl.TensorByRef, weight: popxl.TensorByRef):
            x = ops.host_load(x_stream) + ops.remote_load(buffer, row)
            shard = ops.remote_load(shards, 0)
            x = x * ops.collectives.replicated_all_gather(shard)
            ops.add_(weight, ops.collectives.replicated_all_reduce(x))
            ops.remote_store(buffer, row, x)
            ops.host_store(y_stream, x + weight)
            ops.increment_mod_(row, 1, 4)

        ops.repeat(ir.create_graph(step, row, weight), 2, row, weight)
        ops.add_(weight, ops.sum(large) * 1e-6)
    return ir, {"x": x_stream, "y": y_stream, "variables": (weight, remote, sharded, held)}


def _results(ir: popxl.Ir, names: dict, runs: int = 3) -> list[np.ndarray]:
    inputs = np.random.default_rng(0).normal(size=(2, ir.replication_factor, 16))
    data = inputs.squeeze().astype(np.float32)
    with popxl.Session(ir) as session:
        found = [session.run({names["x"]: data})[names["y"]] for _ in range(runs)]
        values = session.get_tensors_data(names["variables"])
    return [*found, *(np.array(v) for v in values.values())]


def _counted() -> dict[str, int]:
    return dict(vars(statistics))


@pytest.mark.parametrize("replicas", [1, REPLICAS])
def test_a_loaded_executable_gives_the_same_bits(folder, replicas):
    compiled = _results(*_training_like(replicas))
    first = _counted()
    count = first["compiles"]
    assert count > 1
    assert first == {"hits": 0, "misses": count, "traces": count, "compiles": count}
    loaded = _results(*_training_like(replicas))
    assert _counted() == {**first, "hits": count}
    for a, b in zip(compiled, loaded, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    """A folder of the executables of such a program."""
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POPXL_CACHE_DIR", str(folder))
        popxl.Session(_training_like()[0])
    return folder


@pytest.fixture
def from_filled(filled, monkeypatch) -> None:
    monkeypatch.setenv("POPXL_CACHE_DIR", str(filled))


def test_a_loaded_executable_updates_state_in_place(from_filled):
    ir, names = _training_like()
    with popxl.Session(ir) as session:
        assert all(isinstance(e, LoadedSegment) for e in executables(session))
        data = {names["x"]: np.zeros((2, REPLICAS, 16), np.float32)}
        session.run(data)  # the first run may move small arrays that JAX made without copying
        weight = names["variables"][0]
        for _ in range(3):
            before, old = _pointers(session, weight), session._state.variables[weight]
            session.run(data)
            assert _pointers(session, weight) == before
            assert old.is_deleted()


def _pointers(session: popxl.Session, variable: popxl.Variable) -> list[int]:
    shards = session._state.variables[variable].addressable_shards
    return [shard.data.unsafe_buffer_pointer() for shard in shards]


def test_loaded_executables_still_describe_themselves(from_filled):
    session = popxl.Session(_training_like()[0])
    assert "all-reduce" in optimised(session)
    assert temporary_bytes(session) > 0


def test_a_loaded_executable_refuses_arguments_of_another_form(folder):
    popxl.Session(_small())
    session = popxl.Session(_small())
    (segment,), (executable,) = session.schedule.segments, executables(session)
    (spec,), _ = session._program.specs_of(segment)
    right = jax.device_put(np.zeros(spec.shape, spec.dtype), spec.sharding)
    with pytest.raises((TypeError, ValueError)):
        executable()
    with pytest.raises(TypeError, match="but got int32"):
        executable(right.astype(np.int32))
    with pytest.raises(TypeError, match=r"but got float32\(1,\)"):
        executable(right[:1])
    (result,) = executable(right)
    np.testing.assert_array_equal(result, np.ones(3))


def test_equal_segments_are_compiled_and_stored_once(folder):
    def layers(count: int) -> popxl.Ir:
        ir = popxl.Ir()
        with ir.main_graph:
            buffer = popxl.remote_buffer((4,), popxl.float32, count)
            for row in range(count):
                ops.remote_store(buffer, row, ops.tanh(ops.remote_load(buffer, row)))
        return ir

    session = popxl.Session(layers(3))
    assert len(session.schedule.segments) == 3
    assert _counted() == {"hits": 0, "misses": 1, "traces": 1, "compiles": 1}
    assert len(list(folder.iterdir())) == 1
    popxl.Session(layers(7))  # another program with the same segment
    assert _counted() == {"hits": 1, "misses": 1, "traces": 1, "compiles": 1}


def test_a_segment_that_prints_leaves_the_others_cached(folder):
    def program() -> popxl.Ir:
        ir = popxl.Ir()
        with ir.main_graph:
            buffer = popxl.remote_buffer((4,), popxl.float32, 2)
            ops.remote_store(buffer, 0, ops.tanh(ops.remote_load(buffer, 0)))
            ops.remote_store(buffer, 1, ops.print_tensor(ops.remote_load(buffer, 0)))
        return ir

    session = popxl.Session(program())
    assert len(session.schedule.segments) == 2
    assert _counted() == {"hits": 0, "misses": 1, "traces": 2, "compiles": 2}
    popxl.Session(program())
    assert _counted() == {"hits": 1, "misses": 1, "traces": 3, "compiles": 3}


# ---- separate processes -------------------------------------------------------------------------
START = """
import json
import numpy as np
from tests.popxl.test_executable_cache import _training_like
import popxl
from popxl._compile.executable_cache import statistics
from popxl._compile.cache_folder import distrust_reason
ir, names = _training_like()
with popxl.Session(ir) as session:
    y = session.run({names["x"]: np.full((2, 8, 16), 0.3, np.float32)})[names["y"]]
print(json.dumps({"y": y.tobytes().hex(), **vars(statistics)}))
"""


def _started(folder: Path) -> dict:
    """Runs a program in another process, and returns its statistics and result."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(Path(popxl.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "POPXL_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_a_second_start_neither_traces_nor_compiles(folder):
    ir, names = _training_like()
    with popxl.Session(ir) as session:
        y = session.run({names["x"]: np.full((2, 8, 16), 0.3, np.float32)})[names["y"]]
    first, second = _counted(), _started(folder)
    assert first["traces"] == first["compiles"] == first["misses"] > 1
    assert first["hits"] == 0
    assert (second["traces"], second["compiles"], second["misses"]) == (0, 0, 0)
    assert second["hits"] == first["compiles"]
    assert second["y"] == y.tobytes().hex()


# ---- damaged files ------------------------------------------------------------------------------
def _truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _one_bit_flipped(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


def _header_without_end(data: bytes) -> bytes:
    return data[:20]


def _of_another_segment(data: bytes) -> bytes:
    header, _, payload = data.partition(b"\n")
    return json.dumps({**json.loads(header), "key": "0" * 64}).encode() + b"\n" + payload


def _not_an_executable(data: bytes) -> bytes:
    header, payload = json.loads(data.partition(b"\n")[0]), b"no executable"
    header["sha256"] = hashlib.sha256(payload).hexdigest()
    return json.dumps(header).encode() + b"\n" + payload


@pytest.mark.parametrize(
    "damage",
    [_truncated, _one_bit_flipped, _header_without_end, _of_another_segment, _not_an_executable,
     lambda data: b"", lambda data: b"[1]\n", lambda data: os.urandom(1000)],
)  # fmt: skip
def test_a_damaged_file_is_replaced_after_one_warning(folder, damage, caplog):
    popxl.Session(_small())
    (path,) = folder.iterdir()
    good = path.read_bytes()
    path.write_bytes(damage(good))
    with caplog.at_level(logging.WARNING, "popxl"):
        popxl.Session(_small())
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    assert _counted()["compiles"] == 2
    popxl.Session(_small())
    assert _counted() == {"hits": 1, "misses": 2, "traces": 2, "compiles": 2}


def _small(value: float = 1.0, size: int = 3) -> popxl.Ir:
    ir = popxl.Ir()
    with ir.main_graph:
        w = popxl.variable(np.zeros(size, np.float32), name="w")
        ops.add_(w, popxl.constant(value))
    return ir


def test_a_folder_that_cannot_be_written_does_not_stop_the_program(folder, caplog):
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "popxl"):
        popxl.Session(_small())
    assert "not cached" in caplog.text
    assert _counted()["compiles"] == 1


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_to_is_not_used(folder, caplog, mode):
    """Executables are run as they are. A folder that the program makes is its user's alone."""
    popxl.Session(_small())
    assert folder.stat().st_mode & 0o077 == 0
    folder.chmod(mode)
    with caplog.at_level(logging.WARNING, "popxl"):
        popxl.Session(_small())
    assert "is not used: other users can write to it (chmod go-w" in caplog.text
    assert (_counted()["hits"], _counted()["compiles"], len(list(folder.iterdir()))) == (0, 2, 1)


def test_a_file_that_others_can_write_to_is_replaced(folder, caplog):
    popxl.Session(_small())
    (path,) = folder.iterdir()
    path.chmod(0o664)
    with caplog.at_level(logging.WARNING, "popxl"):
        popxl.Session(_small())
    assert "which will be replaced: other users can write to it" in caplog.text
    assert path.stat().st_mode & 0o022 == 0
    popxl.Session(_small())
    assert (_counted()["hits"], _counted()["compiles"]) == (1, 2)


def test_what_belongs_to_another_user_is_not_trusted(tmp_path, monkeypatch):
    found = tmp_path.stat()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    owned = {uid: os.stat_result([*found[:4], uid, *found[5:10]]) for uid in (0, 1000, 1001)}
    assert distrust_reason(owned[0]) is distrust_reason(owned[1000]) is None
    assert distrust_reason(owned[1001]) == "it belongs to another user, 1001"


def test_no_partial_file_is_left(folder):
    popxl.Session(_small())
    assert [p.suffix for p in folder.iterdir()] == [".popxl"]


def test_a_full_folder_loses_what_was_not_used_for_longest(folder, monkeypatch):
    popxl.Session(_small())
    (first,) = folder.iterdir()
    monkeypatch.setenv("POPXL_CACHE_GB", str(2.5 * first.stat().st_size / 1e9))
    old = time.time() - 7200
    for size in (4, 5):
        popxl.Session(_small(size=size))
        for age, path in enumerate(sorted(folder.iterdir(), key=lambda p: p != first)):
            os.utime(path, (old + age, old + age))
        popxl.Session(_small())  # which makes it the newest
    assert len(list(folder.iterdir())) == 2
    assert _counted() == {"hits": 2, "misses": 3, "traces": 3, "compiles": 3}


def test_what_killed_processes_left_half_written_is_deleted(folder):
    folder.mkdir()
    for name in (".old.part", ".new.part", "notes.txt"):
        (folder / name).touch()
    os.utime(folder / ".old.part", (1e9, 1e9))
    os.utime(folder / "notes.txt", (1e9, 1e9))
    popxl.Session(_small())
    left = sorted(path.name for path in folder.iterdir() if path.suffix != ".popxl")
    assert left == [".new.part", "notes.txt"]


@pytest.mark.parametrize("given", ["much", "-1", "nan", "1e"])
def test_a_limit_is_a_number_of_gigabytes(folder, monkeypatch, given):
    monkeypatch.setenv("POPXL_CACHE_GB", given)
    with pytest.raises(ValueError, match=f"POPXL_CACHE_GB is '{given}'"):
        popxl.Session(_small())


def test_sessions_of_several_threads_share_the_cache(folder):
    errors: list[BaseException] = []

    def start() -> None:
        try:
            _results(*_training_like(1), runs=1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    session = popxl.Session(_training_like(1)[0])
    assert len(list(folder.iterdir())) == len(executables(session))


# ---- where, and what not ------------------------------------------------------------------------
def test_the_log_says_what_happened(folder, caplog):
    with caplog.at_level(logging.INFO, "popxl"):
        popxl.Session(_small())
        popxl.Session(_small())
    text = caplog.text
    assert "compiled main.0 in" in text
    assert "cached the executable" in text
    assert "loaded executable from cache in" in text


def test_the_folder_can_come_from_a_session_option(tmp_path, monkeypatch):
    monkeypatch.delenv("POPXL_CACHE_DIR", raising=False)
    ir = _small()
    assert executable_cache.cache_folder(ir) is None
    options = ir._pb_ir.getSessionOptions()
    options.cachePath = str(tmp_path / "of_option")
    assert executable_cache.cache_folder(ir) is None
    options.enableEngineCaching = True
    assert executable_cache.cache_folder(ir) == tmp_path / "of_option"
    monkeypatch.setenv("POPART_CACHE_DIR", str(tmp_path / "of_popart"))
    assert executable_cache.cache_folder(ir) == tmp_path / "of_popart"
    monkeypatch.setenv("POPXL_CACHE_DIR", str(tmp_path / "of_popxl"))
    assert executable_cache.cache_folder(ir) == tmp_path / "of_popxl"


def test_without_a_folder_nothing_is_counted_as_miss(monkeypatch):
    monkeypatch.delenv("POPXL_CACHE_DIR", raising=False)
    before = _counted()
    popxl.Session(_small())
    assert statistics.misses == before["misses"]
    assert statistics.compiles == before["compiles"] + 1


def test_programs_that_print_are_not_cached(folder, caplog):
    ir = popxl.Ir()
    with ir.main_graph:
        ops.print_tensor(popxl.variable(1.0))
    with caplog.at_level(logging.INFO, "popxl"):
        popxl.Session(ir)
    assert "not cached: it calls back to Python" in caplog.text
    assert not folder.exists()


DOUBLE = define("double_for_cache_test", lambda x: x + x)
CALLS_PYTHON = define(
    "python_for_cache_test",
    lambda x: jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
)
LAPACK = define("qr_for_cache_test", lambda x: jax.numpy.linalg.qr(x)[1])


def _with_op(defn) -> popxl.Ir:
    ir = popxl.Ir()
    with ir.main_graph:
        w = popxl.variable(np.eye(3, dtype=np.float32), name="w")
        ops.var_updates.copy_var_update_(w, emit(defn, [w])[0])
    return ir


def test_user_defined_ops_are_cached_by_their_meaning(folder, monkeypatch):
    popxl.Session(_with_op(DOUBLE))
    popxl.Session(_with_op(DOUBLE))
    assert _counted()["hits"] == 1
    object.__setattr__(DOUBLE, "lower", lambda x: x + x + 1)
    popxl.Session(_with_op(DOUBLE))
    assert _counted()["hits"] == 1


@pytest.mark.parametrize("defn", [CALLS_PYTHON, LAPACK])
def test_user_defined_ops_that_leave_xla_are_not_cached(folder, defn, caplog):
    """A fresh process could not run them: XLA would jump to an address it does not know."""
    with caplog.at_level(logging.INFO, "popxl"):
        popxl.Session(_with_op(defn))
    assert "which lives outside XLA" in caplog.text
    assert not folder.exists()
