"""A run is copied to an object store behind it, and goes on from there on another machine."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import run_finetuning
from checkpoints import CheckpointStore, load_checkpoint, object_store_lease
from checkpoints.object_store import RemoteRun
from checkpoints.step_folders import list_step_folders
from config.errors import ConfigError
from run import checkpoint_mirror
from run.checkpoint_mirror import CheckpointMirror
from run.records.metrics_jsonl import read_metrics
from terminal.interrupts import Interrupted, handle_signals
from tests.run.saved import digests
from tests.small_runs import DECODER_TRAINING, few_examples


def steps_in(folder: Path, *steps: int) -> list[Path]:
    with CheckpointStore(folder) as store:
        for step in steps:
            store.save(step, {"a": np.full(9, step, np.float32)}, {}, wait=True)
    return [step.path for step in reversed(list_step_folders(folder))]


def test_steps_are_copied_behind_the_run(tmp_path, address):
    """The newest of those that wait."""
    folder = tmp_path / "run"
    copies, paths = CheckpointMirror(address, 4, folder), steps_in(folder, 10, 20, 30)
    first_has_begun, go_on = threading.Event(), threading.Event()
    upload = copies._remote.upload

    def slowly(step: Path, to_keep: int) -> None:
        first_has_begun.set()
        assert go_on.wait(60)
        upload(step, to_keep)

    copies._remote.upload = slowly
    copies.upload(10, paths[0])
    assert first_has_begun.wait(60)
    copies.upload(20, paths[1])
    copies.upload(30, paths[2])
    assert copies.last_uploaded is None
    go_on.set()
    copies.wait()
    assert copies.last_uploaded == 30
    assert [step.step for step in RemoteRun(address).steps()] == [30, 10]


def test_a_mirror_that_fails_says_so(tmp_path, address, monkeypatch, capsys):
    copies, tries = CheckpointMirror(address, 4, tmp_path / "run"), []
    (path,) = steps_in(tmp_path / "run", 10)
    monkeypatch.setattr(checkpoint_mirror, "RETRY_SECONDS", (0.0, 0.0))
    upload = copies._remote.upload

    def failing(step: Path, to_keep: int) -> None:
        tries.append(step)
        raise ConnectionError("the network is gone")

    copies._remote.upload = failing
    copies.upload(10, path)
    copies.wait()
    assert len(tries) == 3
    said = capsys.readouterr().err
    assert "warning: step 10 is not in the mirror, the run continues: the network is gone" in said
    assert copies.last_uploaded is None
    assert copies.failure_message == (
        f"step 10 is not in {address} (the network is gone), the last that this run copied there "
        f"is none; it is in {tmp_path}/run: the same command copies it"
    )
    copies._remote.upload = upload
    copies.upload(10, path)
    copies.wait()
    assert copies.last_uploaded == 10
    assert copies.failure_message is None


@pytest.fixture
def stuck(tmp_path, address) -> Iterator[CheckpointMirror]:
    """A mirror whose store has taken a request and never answers."""
    folder, ended, began = tmp_path / "run", threading.Event(), threading.Event()
    copies = CheckpointMirror(address, 4, folder)

    def never(step: Path, to_keep: int) -> None:
        began.set()
        ended.wait()

    copies._remote.upload = never
    copies.upload(10, *steps_in(folder, 10))
    assert began.wait(60)
    yield copies
    ended.set()


@pytest.mark.parametrize("signalled", [False, True])
def test_a_store_that_never_answers_is_given_up(stuck, monkeypatch, signalled):
    """Sooner where somebody wants the run to end."""
    monkeypatch.setattr(checkpoint_mirror, "PATIENCE", 1000.0)
    monkeypatch.setattr(checkpoint_mirror, "PATIENCE_AFTER_SIGNAL", 1000.0)
    monkeypatch.setattr(
        checkpoint_mirror, "PATIENCE_AFTER_SIGNAL" if signalled else "PATIENCE", 0.2
    )
    stuck.got_signal = signalled
    with stuck:
        pass
    assert stuck.failure_message is not None
    assert "(it has taken nothing for 0 s)" in stuck.failure_message


def test_a_signal_is_answered_while_the_end_waits(stuck):
    signal_later = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    begun = time.monotonic()
    with handle_signals(), pytest.raises(Interrupted), stuck:
        signal_later.start()
    assert time.monotonic() - begun < 60


def test_a_run_that_a_signal_ends_does_not_wait(stuck):
    with pytest.raises(Interrupted), stuck:
        raise Interrupted(signal.SIGTERM)


def test_a_mirror_that_is_taken_over_gets_nothing_more(tmp_path, address, monkeypatch, capsys):
    monkeypatch.setattr(object_store_lease, "TIMEOUT_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint_mirror, "RETRY_SECONDS", (1000.0,))  # no other trial can help
    with CheckpointMirror(address, 4, tmp_path / "run") as copies:
        CheckpointMirror(address, 4, tmp_path / "new")
        copies.upload(10, *steps_in(tmp_path / "run", 10))
    assert f"the run in {tmp_path}/new on " in copies.failure_message
    assert "has taken" in capsys.readouterr().err
    assert not RemoteRun(address).steps()


def test_what_a_killed_run_did_not_copy_is_copied_by_the_next(tmp_path, address):
    folder = tmp_path / "run"
    steps_in(folder, 10)
    for _ in range(2):
        with CheckpointMirror(address, 4, folder):
            pass
        assert [step.step for step in RemoteRun(address).steps()] == [10]


def test_the_owner_shows_that_it_lives(tmp_path, address, monkeypatch):
    monkeypatch.setattr(checkpoint_mirror, "HEARTBEAT_SECONDS", 0.01)
    remote, seen = RemoteRun(address), set[bytes | None]()
    with CheckpointMirror(address, 4, tmp_path / "run"):
        while len(seen) < 4:
            seen.add(remote.read_file(object_store_lease.FILE_NAME))
    assert b'"beat": 0' in (remote.read_file(object_store_lease.FILE_NAME) or b"")


def test_a_run_that_has_not_mirrored_its_last_step(tmp_path, executables, monkeypatch, capsys):
    """Its exit code says so, and the same command copies it."""
    address, save = f"memory://{tmp_path.name}/run", str(tmp_path / "run")
    flags = [*DECODER_TRAINING, "--steps", "2", "--save", save, "--checkpoint.mirror", address]
    monkeypatch.setattr(checkpoint_mirror, "RETRY_SECONDS", ())

    def refuse(*_: object) -> None:
        raise ConnectionError("the network is gone")

    with few_examples(executables):
        with monkeypatch.context() as patch:
            patch.setattr(RemoteRun, "upload", refuse)
            assert run_finetuning.main(flags) == 2
        said = capsys.readouterr().err.splitlines()
        assert said[-1] == (
            f"error: step 2 is not in {address} (the network is gone), the last that this run "
            f"copied there is none; it is in {save}: the same command copies it"
        )
        assert run_finetuning.main(flags) == 0
        assert "nothing to train" in capsys.readouterr().err
        assert [step.step for step in RemoteRun(address).steps()] == [2]
        object_store_lease.acquire_lease(
            tmp_path / "other", RemoteRun(address), is_new_run=True
        )  # that run has ended
        assert run_finetuning.main(flags) == 2
    assert "has another run, that of" in capsys.readouterr().err


def train(*flags: str) -> None:
    assert run_finetuning.main([*DECODER_TRAINING, "--checkpoint.steps", "2", *flags]) == 0


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
    assert rows[3]["checkpoint/step"] == 4
    assert rows[3]["checkpoint/bytes"] == sum(
        a.nbytes for a in load_checkpoint(first.parent).tensors.values()
    )
    assert rows[7]["checkpoint/step"] == 8
    train("--steps", "8", "--save", "uninterrupted")
    wanted = list_step_folders(tmp_path / "uninterrupted")[0].path
    assert digests(list_step_folders(first.parent)[0].path) == digests(wanted)
    assert RemoteRun(address).steps()[0].step == 8

    train("--steps", "10", "--load", address, "--save", "further")
    assert "starting from step 8 in" in capsys.readouterr().err
    train("--steps", "2", "--save", address, "--overwrite")
    assert [step.step for step in RemoteRun(address).steps()] == [2]


def test_a_mirror_of_nothing():
    with pytest.raises(ConfigError, match="checkpoint.mirror copies what is saved: give --save"):
        run_finetuning.read_command_line(
            "", "finetuning", "tiny", ["--config", "tiny", "--checkpoint.mirror", "s3://b/run"]
        )
