import json
import sys
import types

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl_addons import InputStreams, NamedTensors, OutputStreams, TaskSession
from popxl_addons.task_session import initialise_memmap_dir_from_checkpoint, write_variables_pb
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory


class Loader:
    def __init__(self, position=0):
        self.position = position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def session(value=1.0, names=("a", "b"), memmap_dir=None, max_checkpoints=1):
    """A program that adds its input to two variables, one of them in bfloat16."""
    ir = popxl.Ir()
    with ir.main_graph:
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
    with pytest.raises(KeyError, match=r"part\.other"):
        target.load_from_session(source, report_missing="error")


def test_checkpoints_bring_everything_back(tmp_path):
    s = session()
    s.dataloader = Loader(11)
    s.add_session_state_info({"epoch": 2})
    with s:
        s.run({s.inputs.x: 2.0})
        s.save_checkpoint(str(tmp_path / "step_1"))
        s.run({s.inputs.x: 2.0})
    fresh = session()
    fresh.dataloader = Loader()
    fresh.load_checkpoint(str(tmp_path / "step_1"), report_missing="error")
    assert values(fresh) == {"part.a": 3, "part.b": 3}
    assert (fresh.session_state["steps"], fresh.session_state["epoch"]) == (1, 2)
    assert fresh.dataloader.position == 11
    later = session()
    later.load_checkpoint(str(tmp_path / "step_1"))
    later.dataloader = Loader()
    assert later.dataloader.position == 11


def test_old_checkpoints_are_removed(tmp_path):
    s = session(max_checkpoints=2)
    (tmp_path / "step_notes").mkdir()
    for i in (1, 2, 3):
        s.save_checkpoint(str(tmp_path / f"step_{i}"))
    assert {p.name for p in tmp_path.iterdir()} == {"step_2", "step_3", "step_notes"}


def test_a_folder_must_be_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="is no checkpoint"):
        session().load_checkpoint(str(tmp_path))


def test_state_info_must_be_json():
    with pytest.raises(TypeError, match="not JSON serializable"):
        session().add_session_state_info({"bad": object()})


def test_a_checkpoint_can_start_memory_maps(tmp_path):
    s = session(5.0)
    s.save_checkpoint(str(tmp_path / "c"))
    document = json.loads((tmp_path / "c" / "session_state.json").read_text())
    # Variables are called `<name>.v` where they are made, and part.<name> in the state.
    for name in ("a", "b"):
        (tmp_path / "c" / "variables" / f"part.{name}.npy").rename(
            tmp_path / "c" / "variables" / f"{name}.v.npy"
        )
        document["dtypes"][f"{name}.v"] = document["dtypes"].pop(f"part.{name}")
    (tmp_path / "c" / "session_state.json").write_text(json.dumps(document))
    initialise_memmap_dir_from_checkpoint(tmp_path / "c", tmp_path / "maps")
    mapped = session(1.0, memmap_dir=str(tmp_path / "maps"))
    assert values(mapped) == {"part.a": 5, "part.b": 5}


def test_memory_maps_can_be_left_alone(tmp_path):
    s = session(5.0)
    s.save_checkpoint(str(tmp_path / "c"))
    mapped = session(1.0, memmap_dir=str(tmp_path / "maps"))
    mapped.load_checkpoint(str(tmp_path / "c"), skip_memmap=True)
    assert values(mapped) == {"part.a": 1, "part.b": 1}
    mapped.load_checkpoint(str(tmp_path / "c"))
    assert values(mapped) == {"part.a": 5, "part.b": 5}


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
