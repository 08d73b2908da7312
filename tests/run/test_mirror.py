"""A run is copied to an object store behind it, and goes on from there on another machine."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import run_finetuning
from checkpoints import CheckpointStore, load_checkpoint
from checkpoints.folders import step_folders
from checkpoints.remote import RemoteRun
from config.errors import ConfigError
from run import mirror
from run.mirror import Mirror
from run.records.metrics import read_metrics
from tests.run.saved import digests
from tests.small_runs import TRAINING


def steps_in(folder: Path, *steps: int) -> list[Path]:
    with CheckpointStore(folder) as store:
        for step in steps:
            store.save(step, {"a": np.full(9, step, np.float32)}, {}, wait=True)
    return [step.path for step in reversed(step_folders(folder))]


def test_steps_are_copied_behind_the_run(tmp_path, address):
    """The newest of those that wait."""
    paths, copies = steps_in(tmp_path / "run", 10, 20, 30), Mirror(address, to_keep=4)
    first_has_begun, go_on = threading.Event(), threading.Event()
    put = copies._run.put

    def slowly(step: Path, to_keep: int) -> None:
        first_has_begun.set()
        assert go_on.wait(60)
        put(step, to_keep)

    copies._run.put = slowly
    copies.add(10, paths[0])
    assert first_has_begun.wait(60)
    copies.add(20, paths[1])
    copies.add(30, paths[2])
    assert copies.step is None
    go_on.set()
    copies.wait()
    assert copies.step == 30
    assert [step.step for step in RemoteRun(address).steps()] == [30, 10]


def test_a_mirror_that_fails_says_so(tmp_path, address, monkeypatch, capsys):
    (path,), copies, tries = steps_in(tmp_path / "run", 10), Mirror(address, to_keep=4), []
    monkeypatch.setattr(mirror, "PAUSES", (0.0, 0.0))
    put = copies._run.put

    def failing(step: Path, to_keep: int) -> None:
        tries.append(step)
        raise ConnectionError("the network is gone")

    copies._run.put = failing
    copies.add(10, path)
    copies.wait()
    assert len(tries) == 3
    said = capsys.readouterr().err
    assert "warning: step 10 is not in the mirror, the run goes on: the network is gone" in said
    assert copies.step is None
    copies._run.put = put
    copies.add(10, path)
    copies.wait()
    assert copies.step == 10


def train(*flags: str) -> None:
    assert run_finetuning.main([*TRAINING, "--checkpoint.steps", "2", *flags]) == 0


@pytest.mark.slow
def test_a_run_goes_on_where_its_disk_is_gone(tmp_path, address, executables, monkeypatch, capsys):
    """With the bits of one that never stopped, its metrics too."""
    monkeypatch.setenv("POPXL_CACHE_DIR", str(executables))
    monkeypatch.chdir(tmp_path)
    train("--steps", "4", "--save", address)
    (first,) = Path("runs").rglob("000001-step-4")
    assert "copied to " + address in capsys.readouterr().err
    shutil.rmtree("runs")
    train("--steps", "8", "--save", address)
    said = capsys.readouterr().err
    assert f"000001-step-4 came from {address}" in said
    assert "starting from step 4 in runs/" in said
    rows = read_metrics(first.parent / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[3]["saved_step"] == 4
    assert rows[3]["save_bytes"] == sum(
        a.nbytes for a in load_checkpoint(first.parent).tensors.values()
    )
    assert rows[7]["saved_step"] == 8
    train("--steps", "8", "--save", "uninterrupted")
    wanted = step_folders(tmp_path / "uninterrupted")[0].path
    assert digests(step_folders(first.parent)[0].path) == digests(wanted)
    assert RemoteRun(address).steps()[0].step == 8

    train("--steps", "10", "--load", address, "--save", "further")
    assert "starting from step 8 in" in capsys.readouterr().err
    train("--steps", "2", "--save", address, "--fresh")
    assert [step.step for step in RemoteRun(address).steps()] == [2]


def test_a_mirror_of_nothing():
    with pytest.raises(ConfigError, match="checkpoint.mirror copies what is saved: give --save"):
        run_finetuning.read_command_line(
            "", "finetuning", "tiny", ["--config", "tiny", "--checkpoint.mirror", "s3://b/run"]
        )
