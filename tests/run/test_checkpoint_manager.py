"""When a run saves, and that the disk has room for it."""

from __future__ import annotations

import errno
import shutil
import time
from concurrent import futures
from types import SimpleNamespace

import numpy as np
import pytest

import popdist
from checkpoints import CheckpointError, CheckpointStore, CheckpointWarning, store
from config.families import config_class_of_preset
from config.presets import load_preset, merge_over
from popxl import hardware
from run.checkpoint_manager import CheckpointManager
from run.checkpoint_mirror import CheckpointMirror

TENSORS = {"a": np.ones(1000, np.float32)}


def checkpoints(tmp_path, monkeypatch, clock, **checkpoint) -> CheckpointManager:
    data = merge_over(load_preset("finetuning", "tiny"), {"checkpoint": checkpoint})
    config = config_class_of_preset(data, "tiny").from_dict(data)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    stub = SimpleNamespace(
        hf_config=lambda config: {},
        to_config_json=lambda config: {},
        tensors=lambda optimizer, frozen: TENSORS,
        state=dict,
        to_metadata=dict,
        total=0,
    )
    return CheckpointManager(config, stub, stub, stub, stub, 0)


def test_a_run_is_saved_every_ten_minutes(tmp_path, monkeypatch, capsys):
    clock, folder = [0.0], tmp_path / "run"
    folder.mkdir()
    found = checkpoints(tmp_path, monkeypatch, clock, save=str(folder))
    with found:
        found.on_train_begin()
        assert f"saving every 10 minutes, and at the end in {folder}" in capsys.readouterr().err
        seen = []
        for step in range(1, 31):
            clock[0] = 60.0 * step
            if found.should_save(step):
                found.save(step)
                seen.append(step)
            found.maybe_save(step)
        found.save_last(30)
    assert seen == [10, 20, 30]
    assert CheckpointStore(folder).steps() == [10, 20, 30]


@pytest.fixture
def disk(monkeypatch) -> SimpleNamespace:
    """A disk that fails as often as `failures` says, before anything is written."""
    found, usual = SimpleNamespace(failures=0), store.write_safetensors

    def write_safetensors(*args):
        if found.failures:
            found.failures -= 1
            raise OSError(errno.EIO, "Input/output error")
        usual(*args)

    monkeypatch.setattr(store, "write_safetensors", write_safetensors)
    monkeypatch.setattr("checkpoints.collective_io.RETRY_SECONDS", (0.0, 0.0))
    return found


def saved_at(found: CheckpointManager, steps: range, every: int) -> list[int]:
    """Steps that the training loop saves, each save being over before the next step."""
    seen = []
    for step in steps:
        if found.should_save(step - 1):
            found.save(step - 1)
            seen.append(step - 1)
        if step % every == 0:
            found.save(step)
            seen.append(step)
        if found._store._pending is not None:
            futures.wait([found._store._pending])
    return seen


@pytest.mark.filterwarnings("ignore::checkpoints.CheckpointWarning")
@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_fails_does_not_end_a_run(background, tmp_path, monkeypatch, capsys, disk):
    found = checkpoints(tmp_path, monkeypatch, [0.0], save=str(tmp_path), minutes=None)
    found._in_background = background
    disk.failures = 3  # the write and its two repetitions
    assert saved_at(found, range(1, 10), every=4) == [4, 4, 8]
    said = "Input/output error; the run continues and saves again now"
    assert said in capsys.readouterr().err
    found.save_last(9)
    assert CheckpointStore(tmp_path).steps() == [4, 8, 9]

    disk.failures = 6  # so does the save in its place
    assert saved_at(found, range(10, 18), every=4) == [12, 12, 16]
    assert "the run continues and saves again when the next save is due" in capsys.readouterr().err
    found.save_last(17)
    assert CheckpointStore(tmp_path).steps()[-2:] == [16, 17]

    disk.failures = 10**6
    assert saved_at(found, range(18, 24), every=4) == [20, 20]
    with pytest.raises(CheckpointError, match="cannot save step 2. in .*: Input/output error"):
        saved_at(found, range(24, 30), every=4)
    assert "saved as step 17 in" in found.saved_message


@pytest.mark.filterwarnings("ignore::checkpoints.CheckpointWarning")
def test_the_last_save_takes_the_place_of_one_that_failed(tmp_path, monkeypatch, disk):
    """As when SIGTERM comes just then."""
    found = checkpoints(tmp_path, monkeypatch, [0.0], save=str(tmp_path))
    disk.failures = 4  # a save, and the first attempt of the last one
    found.save(5)
    found.save_last(5)
    assert CheckpointStore(tmp_path).steps() == [5]
    disk.failures = 10**6
    with pytest.raises(CheckpointError, match="cannot save step 6 in"):
        found.save_last(6)


def test_a_folder_that_was_deleted_is_made_again(tmp_path, monkeypatch):
    found = checkpoints(tmp_path, monkeypatch, [0.0], save=str(tmp_path / "run"))
    found.on_train_begin()
    found.save(1)
    found._store.wait()
    shutil.rmtree(tmp_path / "run")
    found.save(2)
    found.save_last(2)
    assert CheckpointStore(tmp_path / "run").steps() == [2]


class Broken:
    """A tokenizer that no library writes."""

    def save_pretrained(self, folder: object) -> None:
        raise Exception("no vocabulary to save")


def test_a_tokenizer_that_cannot_be_copied_ends_nothing(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    found = checkpoints(tmp_path, monkeypatch, [0.0], save=str(folder))
    found._tokenizer = SimpleNamespace(hf_tokenizer=Broken())
    with found:
        found.on_train_begin()
        found.save(1)
        found.save_last(2)
    assert CheckpointStore(folder).steps() == [1, 2]
    assert not (folder / "tokenizer").exists()
    said = capsys.readouterr().err
    assert said.count("warning: the tokenizer is not copied to the run's folder") == 1
    assert "no vocabulary to save; loading the run needs" in said


def test_a_run_that_is_not_saved_says_so(tmp_path, monkeypatch, capsys):
    found = checkpoints(tmp_path, monkeypatch, [0.0], save=None)
    found.on_train_begin()
    assert capsys.readouterr().err.startswith("no checkpoints will be saved")


@pytest.mark.parametrize("background", [True, False])
def test_what_is_recorded_of_saves(background, tmp_path, monkeypatch):
    clock, usual = [0.0], store.write_safetensors

    def slowly(*args):
        clock[0] += 7.0
        usual(*args)

    monkeypatch.setattr(store, "write_safetensors", slowly)
    found = checkpoints(tmp_path, monkeypatch, clock, save=str(tmp_path))
    found._in_background = background
    assert found.report_last_save() == {}
    found.save(5)
    if background:
        futures.wait([found._store._pending])
    facts = found.report_last_save()
    assert facts["checkpoint/step"] == 5
    assert facts["checkpoint/seconds"] == 7.0
    assert facts["checkpoint/bytes"] == 4000
    if not background:
        assert facts["checkpoint/blocked_seconds"] == 7.0
    later = found.report_last_save()
    assert later == {"checkpoint/step": 5, "checkpoint/time": facts["checkpoint/time"]}
    assert abs(later["checkpoint/time"] - time.time()) < 100
    assert found.save_last(6)
    assert found.report_last_save()["checkpoint/step"] == 6
    assert not found.save_last(6)


def test_the_last_step_in_the_mirror_is_recorded(tmp_path, monkeypatch, address):
    folder = tmp_path / "run"
    found = checkpoints(tmp_path, monkeypatch, [0.0], save=str(folder), mirror=address)
    found._mirror = CheckpointMirror(address, 4, folder)
    found.save(5)
    futures.wait([found._store._pending])
    found.report_last_save()
    found._mirror.wait()
    assert found.report_last_save()["checkpoint/mirrored_step"] == 5


def test_process_0_says_when_it_is_time(tmp_path, monkeypatch):
    """Clocks of hosts differ; a save that not all begin would wait for days."""
    clock = [0.0]
    found = checkpoints(tmp_path, monkeypatch, clock, save=str(tmp_path))
    clock[0] = 3600.0
    assert found.should_save(1)
    monkeypatch.setattr("run.checkpoint_manager.is_first_process", lambda: False)
    assert not found.should_save(1)


@pytest.mark.parametrize("checkpoint", [{"minutes": None}, {"minutes": 1000.0}, {"save": None}])
def test_no_time_is_due(tmp_path, monkeypatch, checkpoint):
    clock = [0.0]
    found = checkpoints(tmp_path, monkeypatch, clock, **{"save": str(tmp_path), **checkpoint})
    clock[0] = 3600.0
    assert not found.should_save(1)


def test_room_for_a_step_is_looked_for_before_it_is_written(tmp_path, monkeypatch):
    clock = [0.0]
    found = checkpoints(tmp_path, monkeypatch, clock, save=str(tmp_path), to_keep=2)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3999))
    with pytest.raises(CheckpointError, match="cannot save a step in .* needs 4.00 kB, and 4"):
        found.on_train_begin()
    with pytest.raises(CheckpointError, match="cannot save step 9 in"):
        found.save_last(9)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=11_999))
    with pytest.warns(CheckpointWarning, match="has room for 2 steps of .*, but 2 are kept"):
        found.on_train_begin()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=12_000))
    found.on_train_begin()


@pytest.mark.parametrize(
    ("free", "processes", "waits"),
    [(4000, 1, True), (5000, 1, False), (9999, 2, True), (10000, 2, False), (None, 2, False)],
)
def test_a_save_without_room_for_a_copy_is_written_before_training_goes_on(
    free, processes, waits, tmp_path, monkeypatch, capsys
):
    """Processes of one host, of which each makes a copy, share its memory."""
    found = checkpoints(tmp_path, monkeypatch, [0.0], save=str(tmp_path), minutes=None)
    monkeypatch.setattr(hardware, "free_host_bytes", lambda: free)
    monkeypatch.setattr(popdist, "local_process_count", lambda: processes)
    with found:
        for step in (1, 2):
            found.save(step)
            assert (found._pending_step is None) is waits
            if waits:
                assert CheckpointStore(tmp_path).steps()[-1] == step
    text = "the host's free memory has no room for a copy of 4.00 kB: training waits"
    assert capsys.readouterr().err.count(text) == waits
    assert CheckpointStore(tmp_path).steps() == [1, 2]
