"""Sessions: attaching, variables on both sides, several sessions, devices."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from jax.errors import JaxRuntimeError

import popxl
from popxl import ops
from popxl._compile import platforms
from popxl.errors import DeviceMemoryError, popart_exception
from tests.popxl.programs import f32, store

pytestmark = pytest.mark.usefixtures("cached", "compiled_quickly")


def _counting(replicas: int = 1, **kwargs):
    """A program that adds 1 to `v`, and reads `fixed`."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        v = popxl.variable(np.zeros(2, np.float32), name="v", **kwargs)
        fixed = popxl.variable(f32(2), name="fixed")
        ops.add_(v, popxl.constant(1.0))
        out = store(v + fixed)
    return ir, v, fixed, out


# ---- attaching ----------------------------------------------------------------------------------
def test_entering_loads_and_leaving_brings_back():
    ir, v, fixed, out = _counting()
    session = popxl.Session(ir)
    assert not session.is_attached
    with session as entered:
        assert entered is session
        assert session.is_attached
        session.run()
        assert v._data.tolist() == [0, 0]
        assert not v.in_sync_with_ipu
    assert not session.is_attached
    assert v.in_sync_with_ipu
    assert v._data.tolist() == [1, 1]
    with session:
        np.testing.assert_allclose(session.run()[out], 2 + f32(2), rtol=1e-6)
    np.testing.assert_array_equal(fixed._data, f32(2))


def test_nested_entry_does_nothing():
    ir, v, *_ = _counting()
    session = popxl.Session(ir)
    with session:
        with session:
            session.run()
        assert session.is_attached
        assert v._data.tolist() == [0, 0]
        session.run()
    assert v._data.tolist() == [2, 2]


def test_outside_the_with_block_variables_are_those_of_the_host_and_it_can_be_entered_again():
    ir, v, _, out = _counting()
    session = popxl.Session(ir)
    session.write_variable_data(v, np.full(2, 5, np.float32))
    assert session.get_tensor_data(v).tolist() == [5, 5]
    for attached in (6, 7):
        with session, session:
            np.testing.assert_allclose(session.run()[out], attached + f32(2), rtol=1e-6)
        assert session.get_tensor_data(v).tolist() == [attached, attached]
        with pytest.raises(ValueError, match="with session"):
            session.run()


def test_leaving_by_an_error_also_brings_back():
    ir, v, *_ = _counting()
    session = popxl.Session(ir)

    def fails():
        with session:
            session.run()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not session.is_attached
    assert v._data.tolist() == [1, 1]


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_settling_waits_for_what_runs_have_changed(memory, monkeypatch):
    """A run that hands out nothing waits for nothing."""
    monkeypatch.setattr(platforms.Cpu, "host_memory", memory)
    ir, runs = popxl.Ir(), 8
    with ir.main_graph:
        x = popxl.variable(np.full((1024, 1024), 1 / 1024, np.float32))
        buffer = popxl.remote_buffer(x.shape, x.dtype, 1)
        y = x @ x
        ops.var_updates.copy_var_update_(x, y)
        ops.remote_store(buffer, 0, y)
    with popxl.Session(ir, "cpu") as session:
        session.wait_until_idle()
        for _ in range(runs):
            session.run()
        session.wait_until_idle()
        state = session._state
        assert all(each.is_ready() for each in state.variables.values())
        assert all(entries.array(0).is_ready() for entries in state.entries.values())
        np.testing.assert_allclose(session.get_tensor_data(x), 1 / 1024, rtol=1e-4)


def test_weights_stay_on_the_device_when_asked():
    ir, v, *_ = _counting()
    session = popxl.Session(ir, weights_to_host_on_exit=False)
    with session:
        session.run()
    assert session.get_tensor_data(v).tolist() == [0, 0]


@pytest.mark.parametrize(
    "what", ["run", "run_with_outputs", "weights_to_host", "weights_from_host"]
)
def test_outside_the_with_block_the_message_says_how_to_attach(what):
    session = popxl.Session(_counting()[0])
    with pytest.raises(ValueError, match="with session"):
        getattr(session, what)()


def test_weights_move_when_asked():
    ir, v, *_ = _counting()
    with popxl.Session(ir) as session:
        session.run()
        session.weights_to_host()
        assert v._data.tolist() == [1, 1]
        v._data[:] = 10
        session.weights_from_host()
        session.run()
        assert session.get_tensor_data(v).tolist() == [11, 11]


# ---- reading ------------------------------------------------------------------------------------
def test_reading_gives_the_live_host_array():
    ir, v, fixed, _ = _counting()
    session = popxl.Session(ir)
    array = session.get_tensor_data(v)
    assert array.tolist() == [0, 0]
    with session:
        session.run()
        assert session.get_tensor_data(v) is array
        assert array.tolist() == [1, 1]
        session.run()
        both = session.get_tensors_data([v, fixed])
    assert both[v] is array
    assert array.tolist() == [2, 2]


def test_constants_can_be_read_and_intermediates_cannot():
    ir = popxl.Ir()
    with ir.main_graph:
        c = popxl.constant([1, 2], popxl.int32)
        x = popxl.variable(1.0) + 1.0
    session = popxl.Session(ir)
    assert session.get_tensor_data(c).tolist() == [1, 2]
    with pytest.raises(TypeError, match="only variables and constants have host data"):
        session.get_tensor_data(x)
    with pytest.raises(ValueError, match="belongs to another Ir"):
        popxl.Session(popxl.Ir()).get_tensor_data(c)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_all_replicas_can_be_read(groups):
    ir = popxl.Ir(replication=4)
    grouping = ir.replica_grouping(group_size=4 // groups)
    data = f32(*((groups,) if groups > 1 else ()), 2)
    with ir.main_graph:
        v = popxl.variable(data, replica_grouping=grouping, retrieval_mode="all_replicas")
        one = popxl.variable(data, replica_grouping=grouping)
        rank = popxl.variable(
            np.arange(4, dtype=np.float32), replica_grouping=ir.replica_grouping(1, 1)
        )
        for t in (v, one):
            ops.add_(t, rank)
    initial = np.repeat(data.reshape(groups, 2), 4 // groups, axis=0)
    session = popxl.Session(ir)
    np.testing.assert_array_equal(session.get_tensor_data(v), initial)
    with session:
        session.run()
    after = initial + np.arange(4, dtype=np.float32)[:, None]
    np.testing.assert_allclose(session.get_tensor_data(v), after, rtol=1e-6)
    firsts = after[:: 4 // groups]
    np.testing.assert_allclose(
        session.get_tensor_data(one), firsts if groups > 1 else firsts[0], rtol=1e-6
    )


# ---- writing ------------------------------------------------------------------------------------
@pytest.mark.parametrize("attached", [False, True])
def test_writing_reaches_the_device(attached):
    ir, v, fixed, out = _counting()
    session = popxl.Session(ir)
    if not attached:
        session.write_variables_data({v: [5.0, 6.0], fixed: np.float64([1, 1])})
    with session:
        if attached:
            session.run()
            session.write_variables_data({v: [5.0, 6.0], fixed: np.float64([1, 1])})
        assert session.get_tensor_data(v).tolist() == [5, 6]
        assert session.run()[out].tolist() == [7, 8]
        assert session.get_tensor_data(v).tolist() == [6, 7]


def test_written_data_is_copied():
    ir, v, *_ = _counting()
    session = popxl.Session(ir)
    data = np.ones(2, np.float32)
    session.write_variable_data(v, data)
    data[:] = 9
    assert session.get_tensor_data(v).tolist() == [1, 1]


def test_writing_one_entry_of_a_buffer_keeps_what_the_device_did_to_the_others():
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        buffer = popxl.remote_buffer((2,), popxl.float32, 3)
        a, b = (popxl.remote_variable(np.zeros(2, np.float32), buffer, i) for i in (0, 2))
        for i in range(3):
            ops.remote_store(buffer, i, ops.remote_load(buffer, i) + 1.0)
        middle = store(ops.remote_load(buffer, 1))
    with popxl.Session(ir) as session:
        session.run()
        session.write_variable_data(a, [10.0, 20.0])
        assert session.get_tensor_data(b).tolist() == [1, 1]
        assert session.run()[middle].tolist() == [[2, 2], [2, 2]]
        assert session.get_tensor_data(a).tolist() == [11, 21]
        assert session.get_tensor_data(b).tolist() == [2, 2]


def test_writing_a_grouped_variable():
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        strided = ir.replica_grouping(stride=2, group_size=2)
        v = popxl.variable(np.zeros((2, 3), np.float32), replica_grouping=strided)
        out = store(v)
    with popxl.Session(ir) as session:
        session.write_variable_data(v, f32(2, 3))
        np.testing.assert_array_equal(session.run()[out], f32(2, 3)[[0, 1, 0, 1]])


def test_wrong_writes_are_refused():
    ir, v, *_ = _counting(2, retrieval_mode="all_replicas")
    with ir.main_graph:
        c, w = popxl.constant(1.0), popxl.variable(np.ones(2, np.float32), name="w")
    session = popxl.Session(ir)
    with pytest.raises(NotImplementedError, match="all_replicas"):
        session.write_variable_data(v, np.zeros(2, np.float32))
    with pytest.raises(TypeError, match="only variables can be written"):
        session.write_variable_data(c, 1.0)
    with pytest.raises(ValueError, match=r"'w' needs data of shape \(2,\), but got \(3,\)"):
        session.write_variable_data(w, np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="belongs to another Ir"):
        popxl.Session(popxl.Ir()).write_variable_data(w, np.zeros(2, np.float32))


# ---- memory maps --------------------------------------------------------------------------------
@pytest.fixture
def mapped(tmp_path):
    """A memory map of two zeros, and its file."""
    path = tmp_path / "weights.npy"
    return np.lib.format.open_memmap(path, "w+", np.float32, (2,)), path


def test_a_memory_map_is_the_variable_s_storage(mapped):
    array, path = mapped
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(array)
        ops.add_(v, popxl.constant(1.0))
    with popxl.Session(ir) as session:
        session.run()
        assert session.get_tensor_data(v) is array
    assert np.load(path).tolist() == [1, 1]
    session.write_variable_data(v, [3.0, 4.0])
    assert np.load(path).tolist() == [3, 4]


CREATORS = ["variable", "remote", "sharded", "remote sharded"]


def _mapped_variable(kind, array, grouping=None, **kwargs):
    """A variable of a memory map, and what the program changes to change it by 1 in each run."""
    if kind == "variable":
        v = popxl.variable(array, replica_grouping=grouping, **kwargs)
        ops.add_(v, popxl.constant(1.0))
        return v
    if kind == "sharded":
        v, shard = popxl.replica_sharded_variable(array, replica_grouping=grouping, **kwargs)
        ops.add_(shard, popxl.constant(1.0))
        return v
    shape = array.shape[1:] if grouping is not None and grouping.num_groups > 1 else array.shape
    if kind == "remote":
        buffer = popxl.remote_buffer(shape, popxl.float32)
        create = popxl.remote_variable
    else:
        groups = 1 if grouping is None else grouping.const_rg.num_groups
        on_host = (*([groups] if groups > 1 else []), *shape)
        buffer = popxl.replica_sharded_buffer(on_host, popxl.float32, grouping)
        create = popxl.remote_replica_sharded_variable
    v = create(array, buffer, replica_grouping=grouping, **kwargs)
    ops.remote_store(buffer, 0, ops.remote_load(buffer, 0) + 1.0)
    return v


@pytest.mark.parametrize("kind", CREATORS)
def test_a_memory_map_is_the_host_copy_of_any_variable(mapped, kind, monkeypatch):
    array, path = mapped
    flushed = []
    monkeypatch.setattr(np.memmap, "flush", lambda self: flushed.append(self))
    ir = popxl.Ir(2)
    with ir.main_graph:
        v = _mapped_variable(kind, array)
    with popxl.Session(ir) as session:
        session.run()
        assert session.get_tensor_data(v) is array
        assert array.tolist() == [1, 1]
        flushed.clear()
        session.weights_to_host()
        assert any(f is array for f in flushed)
        session.run()
        flushed.clear()
    assert any(f is array for f in flushed)
    assert session.get_tensor_data(v) is array
    assert np.load(path).tolist() == [2, 2]


@pytest.mark.parametrize("kind", CREATORS)
def test_a_memory_map_keeps_its_dtype(mapped, kind):
    with popxl.Ir().main_graph:
        for dtype in (popxl.float16, popxl.int32):
            with pytest.raises(ValueError, match="memory map of float32, which is used in place"):
                _mapped_variable(kind, mapped[0], dtype=dtype)
        v = _mapped_variable(kind, mapped[0], dtype=popxl.float32)
        assert v._data is mapped[0]


@pytest.mark.parametrize("dtype", [None, popxl.int64])
def test_a_memory_map_that_cannot_be_used_in_place_is_refused(tmp_path, dtype):
    wide = np.lib.format.open_memmap(tmp_path / "wide.npy", "w+", np.int64, (2,))
    square = np.lib.format.open_memmap(tmp_path / "square.npy", "w+", np.float32, (2, 2))
    with popxl.Ir().main_graph:
        with pytest.raises(ValueError, match="memory map of int64, .* make a map of int32"):
            popxl.variable(wide, dtype)
        with pytest.raises(ValueError, match="not contiguous in C order"):
            popxl.variable(square.T)


@pytest.mark.parametrize("kind", CREATORS)
def test_a_memory_map_of_groups_without_stride_is_copied_with_a_warning(tmp_path, kind, capfd):
    array = np.lib.format.open_memmap(tmp_path / "w.npy", "w+", np.float32, (2, 3))
    array[...] = f32(2, 3)
    ir = popxl.Ir(8)
    grouping = ir.replica_grouping_from_assignments([0, 0, 1, 1, 1, 1, 0, 0])
    with ir.main_graph:
        v = _mapped_variable(kind, array, grouping)
    warnings = [line for line in capfd.readouterr().err.splitlines() if "memory map" in line]
    assert len(warnings) == 1
    assert "copy" in warnings[0]
    with popxl.Session(ir) as session:
        session.run()
    np.testing.assert_allclose(session.get_tensor_data(v), f32(2, 3) + 1, rtol=1e-6)
    np.testing.assert_array_equal(array, f32(2, 3))


def test_a_read_only_memory_map_stops_writing_back_for_the_whole_program(mapped):
    _, path = mapped
    before = path.read_bytes()
    array = np.lib.format.open_memmap(path, "r")
    ir = popxl.Ir()
    with ir.main_graph:
        v, w = popxl.variable(array), popxl.variable(np.zeros(2, np.float32))
        ops.add_(v, popxl.constant(1.0))
        ops.add_(w, popxl.constant(1.0))
        out = store(v + w)
    with popxl.Session(ir) as session:
        session.run()
        assert session.run()[out].tolist() == [4, 4]
        with pytest.raises(ValueError, match="read-only memory map"):
            session.write_variable_data(v, [3.0, 4.0])
        with pytest.raises(ValueError, match="read-only memory map"):
            session.weights_to_host()
        assert session.get_tensor_data(v) is array
    assert (array.tolist(), session.get_tensor_data(w).tolist()) == ([0, 0], [0, 0])
    assert path.read_bytes() == before


# ---- several sessions ---------------------------------------------------------------------------
def test_sessions_of_several_programs_live_side_by_side():
    (ir_a, a, *_), (ir_b, b, *_) = _counting(1), _counting(4)
    with popxl.Session(ir_a) as first, popxl.Session(ir_b) as second:
        for _ in range(2):
            first.run()
            second.run()
        first.run()
    assert (a._data.tolist(), b._data.tolist()) == ([3, 3], [2, 2])


def test_sessions_of_one_program_hand_variables_over():
    ir, v, *_ = _counting()
    for n in (1, 2):
        with popxl.Session(ir) as session:
            session.run()
        assert v._data.tolist() == [n, n]


def test_one_program_can_run_with_changed_transfers():
    ir = popxl.Ir()
    with ir.main_graph:
        source, target = popxl.h2d_stream((), popxl.float32), popxl.d2h_stream((), popxl.float32)
        ops.host_store(target, ops.host_load(source))
    popxl.Session(ir)
    ir.num_host_transfers = 2
    with popxl.Session(ir) as session:
        found = session.run({source: np.array([3, 4], np.float32)})[target]
        assert found.tolist() == [3, 0]


# ---- devices ------------------------------------------------------------------------------------
def test_unknown_and_absent_devices_are_named():
    ir = _counting()[0]
    with pytest.raises(ValueError, match="unknown device_desc 'ipu'"):
        popxl.Session(ir, "ipu")
    with pytest.raises(popxl.errors.DeviceError, match="needs 1 tpu device"):
        popxl.Session(ir, "tpu")


@pytest.mark.parametrize("device", ["cpu", "ipu_model", "ipu_hw"])
def test_programs_run_on_what_is_there(device):
    ir, v, *_ = _counting(2)
    with popxl.Session(ir, device) as session:
        session.run()
    assert v._data.tolist() == [1, 1]


def test_large_replication_is_possible():
    ir = popxl.Ir(replication=64)
    with ir.main_graph:
        x = popxl.variable(
            np.arange(64, dtype=np.float32), replica_grouping=ir.replica_grouping(1, 1)
        )
        out = store(ops.collectives.replicated_all_reduce(x))
    with popxl.Session(ir) as session:
        assert session.run()[out].tolist() == [2016.0] * 64


# ---- what is said -------------------------------------------------------------------------------
def test_options_without_meaning_are_mentioned_once(caplog):
    ir = _counting()[0]
    options = ir._pb_ir.getSessionOptions()
    with caplog.at_level(logging.INFO, "popxl"):
        options.someOptionOfTheTest = True
        options.someOptionOfTheTest = False
        options.engineOptions["target.of.the.test"] = "x"
        options.throwIfLog2ScaleTensorNotInRange = False  # this one has a meaning
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 2
    assert "someOptionOfTheTest has no effect" in lines[0]
    assert options.someOptionOfTheTest is False
    assert options.engineOptions["target.of.the.test"] == "x"


@pytest.mark.parametrize(
    ("option", "environment", "written"),
    [
        (set(), None, {"A.dot", "B.dot", "Final.dot"}),
        ({"ALL"}, None, {"A.dot", "B.dot", "Final.dot"}),
        ({"all"}, "b", {"A.dot", "B.dot", "Final.dot"}),
        ({"a"}, "B", {"A.dot", "B.dot"}),
        (set(), "A:b", {"A.dot", "B.dot"}),
        (set(), "FINAL", {"Final.dot"}),
        (set(), "", set()),
        (set(), "other:", set()),
        ({""}, None, set()),
    ],
)
def test_the_checkpoints_that_are_chosen_are_drawn(
    tmp_path, monkeypatch, option, environment, written
):
    monkeypatch.delenv("POPART_DOT_CHECKS", raising=False)
    if environment is not None:
        monkeypatch.setenv("POPART_DOT_CHECKS", environment)
    ir = popxl.Ir()
    options = ir._pb_ir.getSessionOptions()
    options.dotChecks = set(option)
    with ir.main_graph:
        v = popxl.variable(np.zeros(2, np.float32), name="v")
        ops.add_(v, popxl.constant(1.0))
        ir.dot_checkpoint("A", tmp_path / "dots")
        ops.call(ir.create_graph(lambda x: ops.sin(x), v), v)
        ir.dot_checkpoint("B")
    popxl.Session(ir)
    assert options.logDir == str(tmp_path / "dots")
    drawn = {path.name: path.read_text() for path in (tmp_path / "dots").iterdir()}
    assert set(drawn) == written
    assert all(text.startswith("digraph {") and 'label="add_"' in text for text in drawn.values())
    assert all(('label="sin"' in text) == (name != "A.dot") for name, text in drawn.items())


def test_a_program_without_checkpoints_draws_nothing_by_itself(tmp_path, monkeypatch):
    monkeypatch.delenv("POPART_DOT_CHECKS", raising=False)
    ir = _counting()[0]
    ir._pb_ir.getSessionOptions().logDir = str(tmp_path)
    popxl.Session(ir)
    assert list(tmp_path.iterdir()) == []


def test_the_cache_of_the_environment_shows_in_the_options(tmp_path, monkeypatch):
    monkeypatch.delenv("POPXL_CACHE_DIR", raising=False)
    options = popxl.Ir()._pb_ir.getSessionOptions()
    assert (options.enableEngineCaching, options.cachePath) == (False, "")
    monkeypatch.setenv("POPXL_CACHE_DIR", str(tmp_path))
    options = popxl.Ir()._pb_ir.getSessionOptions()
    assert (options.enableEngineCaching, options.cachePath) == (True, str(tmp_path))


def test_printing_reaches_stderr(capfd):
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(np.arange(3, dtype=np.float32))
        printed = ops.print_tensor(v * 2.0, title="twice")
        out = store(printed)
    with popxl.Session(ir) as session:
        assert session.run()[out].tolist() == [0, 2, 4]
    assert "twice: [0. 2. 4.]" in capfd.readouterr().err


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
@pytest.mark.parametrize("kind", ["variable", "constant", "stream"])
def test_elements_of_64_bits_are_refused_rather_than_changed(dtype, kind):
    ir, data = popxl.Ir(), np.ones(2, dtype)
    with ir.main_graph:
        if kind == "stream":
            ops.host_load(popxl.h2d_stream((2,), popxl.dtype.as_dtype(dtype)), "wide")
        elif kind == "constant":
            store(popxl.constant(data, name="wide", downcast=False))
        else:
            popxl.variable(data, name="wide", downcast=False)
    with pytest.raises(popart_exception, match="'wide.* is .*64, but devices have no elements"):
        popxl.Session(ir)


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        *(
            (
                kind(
                    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 529.34MiB with "
                    "allocator GPU_0_bfc on device 0. [executable_name='jit_popxl_segment']"
                ),
                DeviceMemoryError,
                "the memory of the devices is full: "
                "Out of memory while trying to allocate 529.34MiB",
            )
            for kind in (JaxRuntimeError, ValueError)
        ),
        (
            JaxRuntimeError("INTERNAL: a stream: RESOURCE_EXHAUSTED: Out of memory [x]"),
            DeviceMemoryError,
            "the memory of the devices is full: Out of memory",
        ),
        (ValueError("something else"), ValueError, "something else"),
        (JaxRuntimeError("INTERNAL: else"), JaxRuntimeError, "INTERNAL: else"),
    ],
)
def test_a_device_that_is_full_is_named_in_a_sentence(error, expected, message, monkeypatch):
    """The message of XLA on a full H200 becomes a sentence; other errors stay as they are."""

    def full(*_):
        raise error

    ir = popxl.Ir()
    with ir.main_graph:
        ops.host_store(popxl.d2h_stream((), popxl.float32), popxl.constant(1.0))
    session = popxl.Session(ir, "cpu")
    with session:
        for owner, name in ((session._program, "run"), (session._streams, "inputs_to_devices")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, full)
                with pytest.raises(expected) as caught:
                    session.run()
            assert str(caught.value) == message
            assert isinstance(caught.value, MemoryError) == (expected is DeviceMemoryError)
            session.__exit__(None, None, None)
            session.__enter__()
    monkeypatch.setattr(session, "_upload", full)
    with pytest.raises(expected) as caught, session:
        pass
    assert str(caught.value) == message
