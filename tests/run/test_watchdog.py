"""Warnings about a step, a save or a disk that does not end."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import pytest

from run import watchdog
from run.watchdog import Watchdog
from tests.children import child
from tests.small_runs import GPTJ, finetuning

ROOT = Path(__file__).parents[2]
WHERE = "the disk of --execution.disk has not answered"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watchdog, "_POLL_SECONDS", 0.01)


def watched(limit=0.1, disk=lambda: 0.0, received=lambda: None):
    return Watchdog(limit, disk, received)


def test_a_step_that_takes_long_is_told_and_again(capsys, monkeypatch):
    monkeypatch.setattr(watchdog, "REPEAT_SECONDS", 0.2)
    with watched() as watch:
        watch.mark_activity("step", "step 12")
        time.sleep(0.7)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 4
    assert all(line.startswith("warning: the run is at step 12 for ") for line in lines)


def test_steps_that_take_as_long_as_before_are_not_told(capsys):
    with watched(limit=0.2) as watch:
        watch.mark_activity("step", "step 1")
        watch._longest["step"] = 60.0
        time.sleep(0.4)
        watch.mark_activity("step", "step 2")
        time.sleep(0.4)
        assert capsys.readouterr().err == ""
        watch.mark_activity("save", "the save")
        time.sleep(0.4)
    assert capsys.readouterr().err.count("the run is at the save") == 1


def test_many_short_steps_are_not_told(capsys):
    with watched(limit=0.2) as watch:
        for step in range(40):
            watch.mark_activity("step", f"step {step}")
            time.sleep(0.01)
    assert capsys.readouterr().err == ""


def test_a_disk_that_does_not_answer_is_named(capsys):
    with watched(disk=lambda: 7.0) as watch:
        watch.mark_activity("step", "step 3")
        time.sleep(0.1)
    assert f"at step 3 for 0 s, since {WHERE} for 7 s" in capsys.readouterr().err


def test_others_that_are_at_something_else_are_named(capsys, monkeypatch):
    works = {f"process {i}": "step 3 for 5 s" for i in range(1, 4)}
    works |= {
        "process 4": "the samples of step 3 for 9 s",
        "process 5": f"step 3 for 5 s, since {WHERE}",
    }
    works |= {f"process {i}": "step 2 for 9 s" for i in (6, 7)}
    told = []
    monkeypatch.setattr("popdist.peer_status", lambda: works)
    monkeypatch.setattr("popdist.set_status", told.append)
    with watched() as watch:
        watch.mark_activity("step", "step 3")
        time.sleep(0.3)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "; process 4 is at the samples of step 3 for 9 s; process 5 is at step 3 for 5 s, since "
        f"{WHERE}; process 6 is at step 2 for 9 s; and 1 more"
    )
    assert set(told) == {"", "step 3 for 0 s"}


@pytest.mark.parametrize(
    "other", ["", "the save for 9 s", "the save for 9 s, where files do not answer"]
)
def test_who_waits_for_another_that_writes_does_not_give_up(capsys, monkeypatch, other):
    ended = []
    monkeypatch.setattr("popdist.peer_status", lambda: {"process 1": other})
    monkeypatch.setattr("popdist.fail", lambda *given: ended.append(given))
    with watched(received=lambda: "SIGTERM") as watch:
        watch.mark_activity("save", "the save", is_storage=True)
        time.sleep(0.4)
    assert bool(ended) == other.endswith("do not answer")
    assert all(code == 143 for _, code in ended)


PROGRAM = """
import os, sys, time
import numpy as np
from checkpoints import CheckpointStore
from run.stop_signal import StopSignal
from run.watchdog import Watchdog
from terminal.entry_point import entry_point

usual = os.fsync
def fsync(file):
    print("hangs", flush=True)
    time.sleep(sys.maxsize // 10**10)
    usual(file)

@entry_point(single_process=True)
def main(arguments=None):
    with CheckpointStore(sys.argv[1]) as store:
        store.save(1, {"x": np.zeros(3)}, {}, wait=True)
        os.fsync = fsync
        if sys.argv[2] == "training":
            with StopSignal() as stop, Watchdog(2, lambda: 0.0, lambda: stop.received) as watchdog:
                watchdog.mark_activity("save", "the save of step 2", is_storage=True)
                store.save(2, {"x": np.ones(3)}, {}, wait=False)
                store.wait()
        else:
            store.save(2, {"x": np.ones(3)}, {}, wait=False)
            store.wait()

sys.exit(main())
"""


@pytest.mark.parametrize("where", ["training", "before"])
def test_a_signal_ends_a_process_whose_files_do_not_answer(tmp_path, where):
    """Steps that were saved before stay intact."""
    from checkpoints import load_checkpoint

    program = PROGRAM.replace("import os", "from terminal import interrupts\nimport os", 1)
    program = program.replace("usual =", "interrupts.SECONDS_TO_END = 1.0\nusual =", 1)
    command = [sys.executable, "-c", program, str(tmp_path), where]
    process = child(command, cwd=ROOT)
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 143, errors
    last = errors.splitlines()[-1]
    assert last.endswith("what was saved before is intact")
    assert "SIGTERM" in last
    assert ("the save of step 2" in last) == (where == "training")
    assert load_checkpoint(tmp_path).step == 1


HANGS = """
import time
import popdist
from data.loader import Loader
usual, calls = Loader.next_batch, []

def next_batch(self):
    calls.append(None)
    if len(calls) == 3 and popdist.getInstanceIndex():
        time.sleep(8)
    return usual(self)

Loader.next_batch = next_batch
"""


@pytest.mark.slow
def test_a_run_names_the_process_that_it_waits_for(tmp_path):
    runs = finetuning(2, tmp_path, *GPTJ, "--steps", "3", "--watchdog_seconds", "2", first=HANGS)
    said = [run.communicate(timeout=300)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    line = r"run is at step 3 for \d s; process 1 \(pid .*\) is at the samples of step 3 for \d s"
    assert re.search(f"warning: the {line}", said[0]), said[0]
