"""Training in several processes against the same in one: losses, weights, checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoints import load_checkpoint
from checkpoints.safetensors_files import sha256_of_array
from checkpoints.step_folders import list_step_folders
from tests.children import PYTHON_PATH
from tests.run.processes import train
from tests.run.saved import digests, flip_in
from tests.small_runs import GPTJ, RATE, ROOT, finetuning

PROGRAM = Path(__file__).with_name("processes.py")
LAYOUTS = ["2-2", "4-1", "1-4"]
ALL = [f"{preset}-{layout}" for preset in ("tiny", "gptj_tiny") for layout in LAYOUTS]


def trained(processes: int, folder: Path, *cases: str) -> dict[str, Any]:
    """Results of runs with several processes, by case."""
    command = [sys.executable, "-m", "popdist.run", "--processes", str(processes), "--"]
    run = subprocess.run(
        [*command, sys.executable, str(PROGRAM), str(folder), *cases],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
    return {case: json.loads((folder / f"{processes}/{case}.json").read_text()) for case in cases}


def assert_alike(several: dict[str, Any], alone: dict[str, Any]) -> None:
    """All bits are the same, but for those of sums of four terms: the gradients' norms."""
    assert several.pop("norms") == pytest.approx(alone["norms"], rel=1e-6)
    assert several == {name: found for name, found in alone.items() if name != "norms"}


def test_two_processes_train_as_one_does(tmp_path):
    """2 × 2 devices, 2 dp × 2 tp: each sum has two terms, so that all bits are the same."""
    case = "gptj_tiny-2-2"  # T5 takes three times as long to compile
    one, two = train(case, tmp_path / "1"), trained(2, tmp_path, case)
    assert_alike(two[case], one)
    tensors = load_checkpoint(tmp_path / "2" / case).tensors
    sizes = [file.stat().st_size for file in (tmp_path / "2" / case).glob("*/*.safetensors")]
    assert len(sizes) == 2  # each wrote what it holds
    assert max(sizes) < 1.1 * min(sizes)
    for name, expected in one["digests"].items():
        assert sha256_of_array(tensors[name]) == expected, name


@pytest.mark.slow
def test_two_processes_draw_the_same_buckets_of_lengths(tmp_path):
    """Each runs the program of the batch's length, whatever its own samples have."""
    case = "tiny+4,6-2-2"
    assert_alike(trained(2, tmp_path, case)[case], train(case, tmp_path / "1"))


@pytest.mark.slow
def test_any_layout_in_one_two_and_four_processes(tmp_path):
    """Sums of four terms depend on their order, which gloo chooses: the last bits differ."""
    found = {n: trained(n, tmp_path, *ALL) for n in (1, 2, 4)}
    for case in ALL:
        for processes in (2, 4):
            for name in ("losses", "norms"):
                several, alone = found[processes][case][name], found[1][case][name]
                assert several == pytest.approx(alone, rel=1e-6), (processes, case)
    assert_alike(found[2]["tiny-2-2"], found[1]["tiny-2-2"])


# ---- the command --------------------------------------------------------------------------------
STEPS = 120
FLAGS = [
    *GPTJ,
    *("--steps", str(STEPS), "--checkpoint.steps", "50"),
    *("--eval.steps", str(STEPS), "--eval.samples", "10"),
]


def run(folder: Path) -> list[subprocess.Popen[str]]:
    """The same command in two processes, each started by hand."""
    return finetuning(2, folder.parent / "executables", *FLAGS, "--save", str(folder))


def ended(runs: list[subprocess.Popen[str]], code: int = 0) -> str:
    """Messages of the first process at the end; the others print nothing."""
    first, *others = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [code] * len(runs), (first, others)
    assert first[0] == ""
    assert all(said == ("", "") for said in others)
    return first[1]


@pytest.mark.slow
def test_sigterm_to_one_process_ends_both_and_the_same_command_goes_on(tmp_path):
    runs = run(tmp_path / "two")
    assert runs[0].stderr is not None
    lines = iter(runs[0].stderr.readline, "")
    assert any(line.startswith("step ") for line in lines)
    runs[1].send_signal(signal.SIGTERM)
    said = ended(runs, code=128 + signal.SIGTERM)
    stopped = load_checkpoint(tmp_path / "two").step
    assert 0 < stopped < STEPS
    assert f"stopped by SIGTERM after step {stopped}: the same command resumes it\n" in said
    again = ended(run(tmp_path / "two"))
    assert f"starting from step {stopped} in {tmp_path / 'two'}\n" in again
    assert load_checkpoint(tmp_path / "two").step == STEPS


@pytest.mark.slow
def test_damage_that_one_process_finds_leads_both_to_the_step_before(tmp_path):
    """As it reads its ranges; and of a run that is complete, all of whose values are read."""
    folder = tmp_path / "two"
    flags = [*GPTJ, *RATE, "--checkpoint.steps", "2", "--to_keep", "9", "--save", str(folder)]
    seen: dict[int, dict[str, str]] = {}
    for steps in (4, 6, 6):
        said = ended(finetuning(2, tmp_path / "executables", *flags, "--steps", str(steps)))
        newest = list_step_folders(folder)[0]
        assert newest.step == steps
        found = {f.step: digests(f.path) for f in reversed(list_step_folders(folder))}
        assert all(seen[step] == found[step] for step in seen.keys() & found.keys())
        if seen:
            last = max(seen)
            assert f"warning: the checkpoint of step {last} is damaged (tensor " in said
            assert f"is not what was saved); using that of step {last - 2}\n" in said
            assert f"starting from step {last - 2} in {folder}\n" in said
        seen = seen | found
        flip_in(newest.path / "tensors-00001-00001.safetensors")


@pytest.mark.slow
def test_what_is_frozen_comes_from_its_model(tmp_path):
    """Two processes save in parts what they train, and go on from that and from random weights."""
    flags = [*GPTJ, *RATE, "--training.trainable", "layer.0.mlp,lm_head"]
    found = {}
    for name, stops in (("stopped", (2, 4)), ("straight", (4,))):
        folder = tmp_path / name
        for steps in stops:
            saving = ["--save", str(folder), "--steps", str(steps)]
            ended(finetuning(2, tmp_path / "executables", *flags, *saving))
        checkpoint = load_checkpoint(folder)
        found[name] = {n: sha256_of_array(array) for n, array in checkpoint.tensors.items()}
        assert checkpoint.metadata["base"]["name"] == "random"
        weights = {n for n in found[name] if "/" not in n}
        assert weights.isdisjoint(checkpoint.metadata["base"]["sha256"])
        assert {n.partition(".")[0] for n in weights} == {"transformer", "lm_head"}
        assert len(weights) == 5  # a bias of the feed-forward is another variable
    assert found["stopped"] == found["straight"]
