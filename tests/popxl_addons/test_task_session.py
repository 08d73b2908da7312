import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import popxl
from popxl import ops
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
        "model/part.a.npz", "model/part.b.npz", "session_info.json", "dataloader.bin",
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
        assert {p.name for p in model.iterdir()} == {"a.v.npy", "b.v.npy"}
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
