"""A log that breaks ends no run: its reader is gone, its disk is full, the terminal is closed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from checkpoints import load_checkpoint
from terminal.screen import say, tolerate_broken_streams
from tests.small_runs import GPTJ, RATE, finetuning

FLAGS = (*GPTJ, *RATE, "--dropout_prob", "0.1", "--eval.metrics", "loss")


@pytest.mark.slow
def test_a_run_whose_log_nobody_reads_is_trained_and_saved(
    executables: Path, tmp_path: Path
) -> None:
    flags = (*FLAGS, "--steps", "30", "--save", str(tmp_path / "run"))
    (run,) = finetuning(1, executables, *flags)
    assert run.stdout is not None
    assert run.stderr is not None
    assert run.stderr.readline()
    run.stderr.close()
    run.stdout.close()
    assert run.wait(timeout=300) == 0
    assert load_checkpoint(tmp_path / "run").step == 30


@pytest.mark.slow  # by default a run of test_killed_runs.py gets SIGHUP
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_saves_and_its_code_says_that_there_is_more(
    number: int, executables: Path, tmp_path: Path
) -> None:
    """SIGHUP comes with a terminal that is gone."""
    steps = 10**6
    flags = (*FLAGS, "--steps", str(steps), "--save", str(tmp_path / "run"))
    (run,) = finetuning(1, executables, *flags)
    assert run.stderr is not None
    assert any(line.startswith("step ") for line in iter(run.stderr.readline, ""))
    if number == signal.SIGHUP:
        run.stderr.close()
        run.stderr = None
    run.send_signal(number)
    said = run.communicate(timeout=300)[1]
    assert run.returncode == 128 + number
    saved = load_checkpoint(tmp_path / "run").step
    assert 0 < saved < steps
    if number == signal.SIGTERM:
        end = f"stopped by SIGTERM after step {saved}: the same command resumes it"
        assert said.splitlines()[-1] == end


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is full")
def test_what_broke_is_told_on_the_stream_that_is_left(monkeypatch, capfd):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with tolerate_broken_streams():
            say("one")
            say("two")
            print("result")
        assert sys.stderr is full
    assert capfd.readouterr().out == (
        "result\nwarning: standard error broke: No space left on device; lines are missing\n"
    )


def test_streams_that_hold_are_as_before(capsys):
    before = sys.stdout, sys.stderr
    with tolerate_broken_streams():
        assert sys.stderr.isatty() is False
        say("one")
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().err == "one\n"
