"""Signals to all processes of a run at once, as a launcher sends them, whatever they are doing."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from checkpoints import load_checkpoint
from checkpoints.step_folders import list_step_folders
from tests.run.saved import digests
from tests.small_runs import GPTJ, RATE, finetuning

STEPS = 6
FLAGS = (
    *(*GPTJ, *RATE, "--checkpoint.steps", "2", "--to_keep", "9"),
    *("--eval.steps", "3", "--eval.samples", "8", "--eval.metrics", "loss"),
)

# What takes moments takes seconds here, and says when it begins.
SLOW = """
import sys, time

def slow(owner, name, moment, first=1):
    usual, calls = getattr(owner, name), []
    def wrapped(*args, **kwargs):
        calls.append(None)
        if len(calls) == first:
            print("now:", moment, file=sys.stderr, flush=True)
            time.sleep(1.0)
        return usual(*args, **kwargs)
    setattr(owner, name, wrapped)

"""
MOMENTS = {
    "compiles": "import popxl\nslow(popxl.Session, '__init__', 'compiles')\n",
    "loads": "from checkpoints import TensorFiles\nslow(TensorFiles, '_read_chunk', 'loads', 5)\n",
    "saves": "import checkpoints.store as s\nslow(s, 'write_safetensors', 'saves')\n",
    "evaluates": "from run.evaluation.evaluator import Evaluator\n"
    "slow(Evaluator, 'evaluate', 'evaluates')\n",
}


def start(
    folder: Path, executables: Path, steps: int = STEPS, first: str = ""
) -> list[subprocess.Popen[str]]:
    flags = (*FLAGS, "--save", str(folder), "--steps", str(steps))
    return finetuning(2, executables, *flags, first=first)


def ended(runs: list[subprocess.Popen[str]], code: int = 0) -> list[str]:
    said = [run.communicate(timeout=300)[1] for run in runs]
    assert [run.returncode for run in runs] == [code] * len(runs), said
    assert not any("Traceback" in text for text in said), said
    assert not any(said[1:])
    return said


@pytest.fixture(scope="module")
def executables(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("executables")


@pytest.fixture(scope="module")
def whole(executables, tmp_path_factory) -> dict[int, dict[str, str]]:
    """The steps of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    ended(start(folder, executables))
    return {f.step: digests(f.path) for f in list_step_folders(folder)}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_to_all_processes(moment, number, whole, executables, tmp_path):
    """Before the first step it ends them at once; then, after the step that runs, which is saved.
    The same command goes on, bit for bit."""
    folder, before = tmp_path / "run", moment in ("compiles", "loads")
    if moment == "loads":
        ended(start(folder, executables, steps=2))
    runs = start(folder, executables, first=SLOW + MOMENTS[moment])
    for run in runs:
        assert run.stderr is not None
        while (line := run.stderr.readline()) != f"now: {moment}\n":
            assert line, f"process {runs.index(run)} has ended"
    for run in runs:
        run.send_signal(number)
    said = ended(runs, code=128 + number)[0]
    if before:
        sentence = f"interrupted by {number.name}: what was saved before is intact"
        assert said.splitlines()[-1] == sentence
    else:
        assert f"stopped by {number.name} after step" in said
    if moment != "compiles":
        assert load_checkpoint(folder).step < STEPS
    assert not [path for path in folder.glob("*") if path.name.startswith(".draft")]
    ended(start(folder, executables))
    found = {f.step: digests(f.path) for f in list_step_folders(folder)}
    assert set(whole) <= set(found)
    assert all(found[step] == whole[step] for step in whole)
