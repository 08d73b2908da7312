import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.utils import to_numpy
from popxl_addons import InputStreams, NamedTensors, OutputStreams, TaskSession
from popxl_addons.task_session import initialise_memmap_dir_from_checkpoint, write_variables_pb
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory

pytestmark = pytest.mark.usefixtures("cached")


class Loader:
    """As data loaders of applications: its position is a file."""

    def __init__(self, position=0):
        self.position = position

    def save(self, filename):
        Path(filename).write_text(str(self.position))

    def resume(self, filename):
        self.position = int(Path(filename).read_text())


def session(value=1.0, names=("a", "b"), memmap_dir=None, max_checkpoints=1, scope="main"):
    """A program that adds its input to two variables, one of them in bfloat16."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.name_scope(scope):
        inputs = InputStreams(x=((), popxl.float32))
        outputs = OutputStreams(y=popxl.TensorSpec((), popxl.float32))
        x = ops.host_load(inputs.x)
        dtypes = (popxl.float32, popxl.bfloat16)
        state = NamedTensors()
        for name, dtype in zip(names, dtypes, strict=True):
            factory = NamedVariableFactories(v=VariableFactory(value, dtype, by_ref=True))
            variable = factory.init(name, memmap_dir=memmap_dir).v
            state.insert(f"part.{name}", variable, overwrite=True)
            ops.var_updates.accumulate_(state.part[name], x)
        ops.host_store(outputs.y, x + state.part[names[0]])
    return TaskSession(inputs, outputs, state, max_checkpoints, ir=ir, device_desc="cpu")


def values(s):
    return {n: float(d) for n, d in s.get_named_tensors_data().to_dict().items()}


def test_streams_and_variables_have_names():
    s = session()
    with s:
        out = s.run({s.inputs.x: 2.0})
    assert out[s.outputs.y] == 5
    assert values(s) == {"part.a": 3, "part.b": 3}
    assert s.session_state["steps"] == 1


def test_plain_streams_get_their_ids_as_names():
    ir = popxl.Ir()
    with ir.main_graph:
        stream = popxl.h2d_stream((), popxl.float32, "in")
        ops.host_load(stream)
    s = TaskSession([stream], [], NamedTensors(), ir=ir)
    assert list(s.inputs) == [stream] == [s.inputs.get("in")]
    assert len(s.outputs) == 0


def test_variables_come_from_another_session_by_name(caplog):
    source, target = session(7.0), session(1.0, names=("a", "other"))
    target.load_from_session(source)
    assert values(target) == {"part.a": 7, "part.other": 1}
    assert not caplog.text
    target.load_from_session(source, report_missing="warn")
    assert "part.other" in caplog.text
    with pytest.raises(ValueError, match=r"part\.other"):
        target.load_from_session(source, report_missing="error")


def test_checkpoints_bring_everything_back(tmp_path):
    s = session()
    s.dataloader = Loader(11)
    s.add_session_state_info({"epoch": 2})
    with s:
        s.run({s.inputs.x: 2.0})
        s.save_checkpoint(str(tmp_path / "step_1"))
        s.run({s.inputs.x: 2.0})
    fresh = session(scope="elsewhere")  # checkpoints hold names of trees, not of tensors
    fresh.dataloader = Loader()
    fresh.add_session_state_info({"epoch": 0})
    fresh.load_checkpoint(str(tmp_path / "step_1"), report_missing="error")
    assert values(fresh) == {"part.a": 3, "part.b": 3}
    assert (fresh.session_state["steps"], fresh.session_state["epoch"]) == (1, 2)
    assert fresh.dataloader.position == 11


def test_the_files_of_a_checkpoint(tmp_path):
    s = session(3.0)
    s.dataloader = Loader(7)
    s.save_checkpoint(str(tmp_path / "c"))
    files = {p.relative_to(tmp_path / "c").as_posix() for p in (tmp_path / "c").rglob("*.*")}
    assert files == {
        "model/part.a.npz", "model/part.b.npz", "model/arrays.json", "session_info.json",
        "dataloader.bin",
    }  # fmt: skip
    with np.load(tmp_path / "c" / "model" / "part.a.npz", allow_pickle=False) as arrays:
        assert list(arrays) == ["part.a"]
        assert arrays["part.a"] == np.float32(3)
    assert json.loads((tmp_path / "c" / "session_info.json").read_text()) == {"steps": 0}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_files_made_elsewhere_are_loaded(tmp_path):
    (tmp_path / "model").mkdir()
    np.savez(tmp_path / "model" / "part.a.npz", **{"part.a": np.float32(4)})
    half = np.array(5, popxl.bfloat16.as_numpy()).view(np.uint16)
    np.savez(tmp_path / "model" / "part.b.npz", **{"part.b": half})
    (tmp_path / "session_info.json").write_text('{"steps": 9}')
    s = session()
    s.load_checkpoint(str(tmp_path), "error")
    assert values(s) == {"part.a": 4, "part.b": 5}
    assert s.session_state["steps"] == 9


@pytest.mark.parametrize(
    ("names", "message"), [(("a", "c"), r"no data for .*part\.c"), (("a",), r"data for .*part\.b")]
)
def test_names_that_do_not_match_are_reported(tmp_path, caplog, names, message):
    session(6.0).save_checkpoint(str(tmp_path / "c"))
    target = session(1.0, names=(*names, "b")[:2] if len(names) > 1 else ("a", "b"))
    if len(names) == 1:
        target.state = NamedTensors.from_dict({"part.a": target.state.part.a})
    target.load_checkpoint(str(tmp_path / "c"), "none")
    assert not caplog.text
    assert values(target)["part.a"] == 6
    target.write_variable_data(target.state.part.a, np.float32(1))
    with pytest.raises(ValueError, match=message):
        target.load_checkpoint(str(tmp_path / "c"), "error")
    assert values(target)["part.a"] == 1
    target.load_checkpoint(str(tmp_path / "c"))
    assert re.search(message, caplog.text)


@pytest.mark.parametrize("lacks", ["save", "resume"])
def test_a_dataloader_saves_and_resumes(lacks):
    has = "resume" if lacks == "save" else "save"
    s = session()
    with pytest.raises(ValueError, match=f"needs a method '{lacks}'"):
        s.dataloader = types.SimpleNamespace(**{has: lambda *a: None})
    s.dataloader = None


def test_a_dataloader_without_its_file_is_reported(tmp_path, caplog):
    s = session()
    s.save_checkpoint(str(tmp_path / "c"))
    s.dataloader = Loader(3)
    s.load_checkpoint(str(tmp_path / "c"))
    assert "the dataloader starts anew" in caplog.text
    assert s.dataloader.position == 3


def test_old_checkpoints_of_the_session_are_removed(tmp_path):
    session().save_checkpoint(str(tmp_path / "of_another"))
    s = session(max_checkpoints=2)
    for name in ("one", "two", "one", "three"):
        s.save_checkpoint(str(tmp_path / name))
    assert {p.name for p in tmp_path.iterdir()} == {"one", "three", "of_another"}
    single = session()
    for name in ("x", "y"):
        single.save_checkpoint(str(tmp_path / "deep" / name))
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["y"]


def test_other_files_of_the_folder_stay(tmp_path):
    (tmp_path / "config.yml").write_text("lr: 1")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    for value in (2.0, 3.0):
        s = session(value)
        s.save_checkpoint(str(tmp_path))
    assert (tmp_path / "config.yml").read_text() == "lr: 1"
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"
    fresh = session()
    fresh.load_checkpoint(str(tmp_path), "error")
    assert values(fresh) == {"part.a": 3, "part.b": 3}
    assert not [p.name for p in (tmp_path / "model").iterdir() if p.name.startswith(".")]


def test_a_save_that_fails_while_it_writes_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    s = session(2.0)
    s.save_checkpoint(str(tmp_path / "c"))
    s.write_variable_data(s.state.part.a, np.float32(9))

    save = np.savez

    def fail(file, **arrays):
        if "part.b" in arrays:
            raise OSError("disk full")
        save(file, **arrays)

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        s.save_checkpoint(str(tmp_path / "c"))
    fresh = session()
    fresh.load_checkpoint(str(tmp_path / "c"), "error")
    assert values(fresh) == {"part.a": 2, "part.b": 2}


def test_a_map_that_lives_in_the_checkpoint_stays_where_it_is(tmp_path):
    s = session(5.0, memmap_dir=str(tmp_path / "model"))
    s.save_checkpoint(str(tmp_path))
    fresh = session(memmap_dir=str(tmp_path / "maps"))
    fresh.load_checkpoint(str(tmp_path), "error")
    assert values(fresh) == {"part.a": 5, "part.b": 5}


def test_a_folder_must_be_a_checkpoint_but_may_lack_the_session_state(tmp_path, caplog):
    with pytest.raises(ValueError, match="is no checkpoint"):
        session().load_checkpoint(str(tmp_path))
    saved = session(4.0)
    saved.add_session_state_info({"epoch": 3})
    saved.save_checkpoint(str(tmp_path / "c"))
    plain = session()
    with pytest.raises(ValueError, match="epoch"):  # a key too many
        plain.load_checkpoint(str(tmp_path / "c"), "error")
    assert values(plain)["part.a"] == 1
    (tmp_path / "c" / "session_info.json").unlink()
    with pytest.raises(ValueError, match="epoch"):  # and one missing
        saved.load_checkpoint(str(tmp_path / "c"), "error")
    saved.session_state["steps"] = 7
    saved.load_checkpoint(str(tmp_path / "c"))
    assert "epoch" in caplog.text
    assert saved.session_state == {"steps": 0}


def test_state_info_must_be_json():
    with pytest.raises(TypeError, match="not JSON serializable"):
        session().add_session_state_info({"bad": object()})


@pytest.mark.parametrize("from_maps", [True, False])
def test_a_checkpoint_can_start_memory_maps(tmp_path, from_maps):
    s = session(5.0, memmap_dir=str(tmp_path / "old") if from_maps else None)
    s.save_checkpoint(str(tmp_path / "c"))
    model = tmp_path / "c" / "model"
    if from_maps:
        assert {p.name for p in model.iterdir()} == {"a.v.npy", "b.v.npy", "arrays.json"}
    else:  # variables are called `<name>.v` where they are made, and part.<name> in the state
        for name in ("a", "b"):
            with np.load(model / f"part.{name}.npz") as arrays:
                np.savez(model / f"{name}.v.npz", **{f"{name}.v": arrays[f"part.{name}"]})
            (model / f"part.{name}.npz").unlink()
    initialise_memmap_dir_from_checkpoint(tmp_path / "c", tmp_path / "maps")
    mapped = session(1.0, memmap_dir=str(tmp_path / "maps"))
    assert values(mapped) == {"part.a": 5, "part.b": 5}


def test_memory_maps_are_copied_as_files(tmp_path):
    s = session(5.0, memmap_dir=str(tmp_path / "source"))
    s.save_checkpoint(str(tmp_path / "c"))
    copied, source = (tmp_path / f / "a.v.npy" for f in ("c/model", "source"))
    assert copied.read_bytes() == source.read_bytes()
    mapped = session(1.0, memmap_dir=str(tmp_path / "maps"))
    mapped.load_checkpoint(str(tmp_path / "c"), "error", skip_memmap=True)
    assert values(mapped) == {"part.a": 1, "part.b": 1}
    mapped.load_checkpoint(str(tmp_path / "c"), "error")
    assert values(mapped) == {"part.a": 5, "part.b": 5}
    assert np.fromfile(tmp_path / "maps" / "a.v.npy", np.float32).tolist() == [5]


def test_many_variables_are_written_with_progress(caplog):
    s = session()
    caplog.set_level("INFO")
    write_variables_pb(s, {t: np.float32(9) for t in s.state.tensors})
    assert values(s) == {"part.a": 9, "part.b": 9}
    assert "wrote 2 of 2" in caplog.text


def test_histograms_go_to_the_active_run(monkeypatch):
    logged = []
    run = types.SimpleNamespace(log=lambda data, step: logged.append((data, step)))
    wandb = types.SimpleNamespace(run=run, Histogram=lambda x: x.tolist())
    s = session()
    s.wandb_variable_histograms()  # no run: nothing happens
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    s.wandb_variable_histograms(step=3)
    assert logged == [({"part.a": [1.0]}, 3), ({"part.b": [1.0]}, 3)]


# ---- dtypes and shapes --------------------------------------------------------------------------
VALUES = np.array([1.5, -2.0, 0.0, 3.0])
SAVED = [popxl.float32, popxl.float16, popxl.bfloat16, popxl.float8_e5m2, popxl.float8_143,
         popxl.int32, popxl.uint16, popxl.uint8, popxl.bool]  # fmt: skip


def one_variable(dtype, shape=(4,), folder=None, data=VALUES):
    """A program of one variable, in an ordinary array or in a memory map of this folder."""
    host = to_numpy(np.asarray(data)[: np.prod(shape)].reshape(shape).clip(0), dtype)
    if folder is not None:
        folder.mkdir(parents=True)
        host = np.memmap(folder / "w.bin", host.dtype, "w+", shape=shape)
        host[...] = to_numpy(np.zeros(shape), dtype)
    ir = popxl.Ir()
    with ir.main_graph:
        w = popxl.variable(host, dtype, name="w")
    return TaskSession([], [], NamedTensors.from_dict({"w": w}), ir=ir)


def held_by(s):
    return s.get_tensor_data(s.state.w)


def kind_of(dtype):
    if dtype.is_floating_point and dtype.itemsize > 1:
        return "numbers"
    return "whole numbers" if dtype.is_int else dtype.name


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("saved", SAVED, ids=lambda d: d.name)
def test_a_checkpoint_brings_back_numbers_in_each_dtype_that_holds_them(saved, mapped, tmp_path):
    source = one_variable(saved, folder=tmp_path / "maps" if mapped else None)
    source.write_variable_data(source.state.w, to_numpy(VALUES.clip(0), saved))
    source.save_checkpoint(str(tmp_path / "c"))
    for wanted in SAVED:
        target = one_variable(wanted, data=VALUES + 7)
        before = held_by(target).copy()
        if kind_of(wanted) == kind_of(saved):
            target.load_checkpoint(str(tmp_path / "c"), "error")
            assert held_by(target).tobytes() == to_numpy(held_by(source), wanted).tobytes()
        else:
            with pytest.raises(ValueError, match=f"{saved.name} for 'w'.*is {wanted.name}"):
                target.load_checkpoint(str(tmp_path / "c"), "error")
            with pytest.raises(ValueError, match=f"{saved.name} for 'w'.*is {wanted.name}"):
                target.load_from_session(source)
            assert held_by(target).tobytes() == before.tobytes()


@pytest.mark.parametrize("from_map", [False, True])
@pytest.mark.parametrize("to_map", [False, True])
def test_arrays_and_memory_maps_load_each_other(from_map, to_map, tmp_path):
    source = one_variable(popxl.bfloat16, folder=tmp_path / "from" if from_map else None)
    source.write_variable_data(source.state.w, VALUES)
    source.save_checkpoint(str(tmp_path / "c"))
    target = one_variable(popxl.float32, folder=tmp_path / "to" if to_map else None)
    target.load_checkpoint(str(tmp_path / "c"), "error")
    np.testing.assert_array_equal(held_by(target), VALUES)
    for shape in ((2,), (2, 2)):
        other = one_variable(popxl.bfloat16, shape)
        with pytest.raises(ValueError, match=r"'w' needs data of shape"):
            other.load_checkpoint(str(tmp_path / "c"))


def test_numbers_that_a_narrower_dtype_does_not_reach_are_refused(tmp_path):
    source = one_variable(popxl.float32, data=np.array([1e6, np.inf, np.nan, 0]))
    source.save_checkpoint(str(tmp_path))
    with pytest.raises(
        ValueError, match="numbers for 'w', float32, that .* float16 does not reach"
    ):
        one_variable(popxl.float16).load_checkpoint(str(tmp_path))
    wide = one_variable(popxl.bfloat16)
    wide.load_checkpoint(str(tmp_path))
    assert np.isinf(held_by(wide)[1])
    one_variable(popxl.int32, data=np.arange(4) * 300).save_checkpoint(str(tmp_path / "c"))
    with pytest.raises(ValueError, match="'w': 900 does not fit uint8"):
        one_variable(popxl.uint8).load_checkpoint(str(tmp_path / "c"))


def test_without_an_index_bits_are_told_from_numbers_by_the_variable(tmp_path):
    source = one_variable(popxl.bfloat16)
    source.save_checkpoint(str(tmp_path / "c"))
    (tmp_path / "c/model/arrays.json").unlink()
    target = one_variable(popxl.bfloat16, data=VALUES + 7)
    target.load_checkpoint(str(tmp_path / "c"), "error")
    np.testing.assert_array_equal(held_by(target), held_by(source))
    with pytest.raises(ValueError, match="uint16 for 'w', but the variable is float32"):
        one_variable(popxl.float32).load_checkpoint(str(tmp_path / "c"))


def test_without_an_index_a_memory_map_has_the_size_of_its_own_file(tmp_path):
    one_variable(popxl.float32, folder=tmp_path / "a").save_checkpoint(str(tmp_path / "c"))
    (tmp_path / "c/model/arrays.json").unlink()
    one_variable(popxl.float32, folder=tmp_path / "b").load_checkpoint(str(tmp_path / "c"), "error")
    for number, (dtype, shape) in enumerate([(popxl.float32, (2,)), (popxl.bfloat16, (4,))]):
        target = one_variable(dtype, shape, tmp_path / f"t{number}")
        with pytest.raises(ValueError, match=r"w\.bin has 16 bytes, but .* needs 8"):
            target.load_checkpoint(str(tmp_path / "c"))


@pytest.mark.parametrize("name", ["w.npz", "arrays.json", "../session_info.json"])
@pytest.mark.parametrize("content", [b"", b"[1", b"\x93NUMPY\x01\x00", b"[[1, 2], [3, 4]]"])
def test_damaged_files_are_named_and_nothing_is_loaded(name, content, tmp_path):
    one_variable(popxl.float32).save_checkpoint(str(tmp_path / "c"))
    (tmp_path / "c/model" / name).write_bytes(content)
    target = one_variable(popxl.float32, data=VALUES + 7)
    before = held_by(target).copy()
    with pytest.raises(ValueError, match=f"{Path(name).name} (is damaged|cannot be read)"):
        target.load_checkpoint(str(tmp_path / "c"))
    np.testing.assert_array_equal(held_by(target), before)


def test_two_maps_of_one_file_name_cannot_be_in_one_checkpoint(tmp_path):
    ir, state = popxl.Ir(), NamedTensors()
    with ir.main_graph:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            data = np.memmap(tmp_path / name / "w", np.float32, "w+", shape=(2,))
            state.insert(name, popxl.variable(data, name=name))
    s = TaskSession([], [], state, ir=ir)
    with pytest.raises(ValueError, match="one file of the checkpoint"):
        s.save_checkpoint(str(tmp_path / "c"))


def test_two_parts_of_one_file_are_saved_once(tmp_path):
    def parts(folder):
        folder.mkdir()
        np.arange(4, dtype=np.float32).tofile(folder / "w")
        ir, state = popxl.Ir(), NamedTensors()
        with ir.main_graph:
            for name, offset in (("a", 0), ("b", 8)):
                data = np.memmap(folder / "w", np.float32, "r+", offset, (2,))
                state.insert(name, popxl.variable(data, name=name))
        return TaskSession([], [], state, ir=ir)

    source, target = parts(tmp_path / "source"), parts(tmp_path / "target")
    source.write_variable_data(source.state.b, np.float32([7, 8]))
    (tmp_path / "c/model").mkdir(parents=True)
    (tmp_path / "c/model/.w").write_bytes(b"what a save left that was killed")
    source.save_checkpoint(str(tmp_path / "c"))
    target.load_checkpoint(str(tmp_path / "c"), "error")
    assert target.get_tensor_data(target.state.a).tolist() == [0, 1]
    assert target.get_tensor_data(target.state.b).tolist() == [7, 8]


@pytest.mark.parametrize("through", ["factories", "a checkpoint"])
@pytest.mark.parametrize(("dtype", "shape"), [(popxl.float16, (2, 3)), (popxl.bfloat16, (3, 2))])
def test_a_map_of_another_dtype_or_shape_is_not_taken_for_a_variable(
    through, dtype, shape, tmp_path
):
    def mapped(dtype, shape, folder):
        with popxl.Ir().main_graph as graph:
            factory = NamedVariableFactories(v=VariableFactory(np.ones(shape), dtype))
            return TaskSession([], [], factory.init(memmap_dir=str(folder)), ir=graph.ir)

    saved = mapped(popxl.bfloat16, (2, 3), tmp_path / "maps")
    if through == "a checkpoint":
        saved.save_checkpoint(str(tmp_path / "c"))
        initialise_memmap_dir_from_checkpoint(tmp_path / "c", tmp_path / "copied")
    folder = tmp_path / ("maps" if through == "factories" else "copied")
    with pytest.raises(ValueError, match=r"v\.npy holds bfloat16 of shape \(2, 3\), but variable"):
        mapped(dtype, shape, folder)
    assert (mapped(popxl.bfloat16, (2, 3), folder).state.v.shape) == (2, 3)
