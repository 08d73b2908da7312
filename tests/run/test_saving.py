"""When a run saves, and that the disk has room for it."""

from __future__ import annotations

import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest

from checkpoints import CheckpointError, CheckpointStore, CheckpointWarning
from config.families import config_class_of
from config.presets import merge, preset_data
from run.saving import Checkpoints

TENSORS = {"a": np.ones(1000, np.float32)}


def checkpoints(tmp_path, monkeypatch, clock, **checkpoint) -> Checkpoints:
    data = merge(preset_data("finetuning", "tiny"), {"checkpoint": checkpoint})
    config = config_class_of(data, "tiny").from_dict(data)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    stub = SimpleNamespace(
        hf_config=lambda config: {},
        to_config_json=lambda config: {},
        tensors=lambda optimizer: TENSORS,
        state=dict,
        total=0,
    )
    return Checkpoints(config, stub, stub, stub, stub, stub, 0)


def test_a_run_is_saved_every_ten_minutes(tmp_path, monkeypatch, capsys):
    clock, folder = [0.0], tmp_path / "run"
    folder.mkdir()
    found = checkpoints(tmp_path, monkeypatch, clock, save=str(folder))
    with found:
        found.begin()
        assert f"saving every 10 minutes, and at the end in {folder}" in capsys.readouterr().err
        seen = []
        for step in range(1, 31):
            clock[0] = 60.0 * step
            if found.is_due(step):
                found.save(step)
                seen.append(step)
            found.after(step)
        found.finish(30)
    assert seen == [10, 20, 30]
    assert CheckpointStore(folder).steps() == [10, 20, 30]


def test_a_run_that_is_not_saved_says_so(tmp_path, monkeypatch, capsys):
    found = checkpoints(tmp_path, monkeypatch, [0.0], save=None)
    found.begin()
    assert capsys.readouterr().err.startswith("no checkpoints are saved")


def test_process_0_says_when_it_is_time(tmp_path, monkeypatch):
    """Clocks of hosts differ; a save that not all begin would wait for days."""
    clock = [0.0]
    found = checkpoints(tmp_path, monkeypatch, clock, save=str(tmp_path))
    clock[0] = 3600.0
    assert found.is_due(1)
    monkeypatch.setattr("run.saving.is_first_process", lambda: False)
    assert not found.is_due(1)


@pytest.mark.parametrize("checkpoint", [{"minutes": None}, {"minutes": 1000.0}, {"save": None}])
def test_no_time_is_due(tmp_path, monkeypatch, checkpoint):
    clock = [0.0]
    found = checkpoints(tmp_path, monkeypatch, clock, **{"save": str(tmp_path), **checkpoint})
    clock[0] = 3600.0
    assert not found.is_due(1)


def test_room_for_a_step_is_looked_for_before_it_is_written(tmp_path, monkeypatch):
    clock = [0.0]
    found = checkpoints(tmp_path, monkeypatch, clock, save=str(tmp_path), to_keep=2)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3999))
    with pytest.raises(CheckpointError, match="cannot save a step in .* needs 0.00 MB, and 0.00"):
        found.begin()
    with pytest.raises(CheckpointError, match="cannot save step 7 in"):
        found.save(7)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=11_999))
    with pytest.warns(CheckpointWarning, match="has room for 2 steps of .*, but 2 are kept"):
        found.begin()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=12_000))
    found.begin()
