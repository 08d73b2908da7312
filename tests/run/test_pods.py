"""The largest preset's program in the processes it is for, 64 wide and of three layers, which are
all its kinds: saved, killed, continued."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from checkpoints.step_folders import list_step_folders
from tests.run.saved import digests
from tests.small_runs import finetuning

PROCESSES, STEPS = 8, 3
FLAGS = (
    *("--config", "xxl_pod64", "--layers", "3"),
    *("--hidden_size", "64", "--d_ff", "64", "--d_kv", "4"),
    *("--heads", "16", "--sequence_length", "16", "--decoder_sequence_length", "8"),
    *("--vocab_size", "256", "--data.dataset", "sample", "--load", "random", "--device", "cpu"),
    *("--global_batch_size", "4", "--execution.rts_weights_threshold", "0", "--steps", str(STEPS)),
    *("--checkpoint.steps", "1", "--to_keep", "9"),
)


def start(folder: Path, executables: Path):
    return finetuning(PROCESSES, executables, *FLAGS, "--save", str(folder))


def ended(runs) -> None:
    said = [run.communicate(timeout=3600)[1] for run in runs]
    assert [run.returncode for run in runs] == [0] * len(runs), said


@pytest.mark.slow
def test_64_replicas_in_8_processes_go_on_bit_for_bit(tmp_path):
    """4 dp × 16 tp, every variable sharded over the replicas that hold it alike."""
    begin = time.monotonic()
    executables = tmp_path / "executables"
    ended(start(tmp_path / "whole", executables))
    print(f"{STEPS} steps, each saved, after {time.monotonic() - begin:.0f} s")
    runs = start(tmp_path / "killed", executables)
    while not list_step_folders(tmp_path / "killed"):
        time.sleep(0.05)
        assert all(run.poll() is None for run in runs)
    runs[3].kill()
    for run in runs:
        run.communicate(timeout=600)
    saved = list_step_folders(tmp_path / "killed")[0].step
    print(f"killed after step {saved}, {time.monotonic() - begin:.0f} s")
    assert saved < STEPS
    ended(start(tmp_path / "killed", executables))
    print(f"continued to the end after {time.monotonic() - begin:.0f} s")
    whole, killed = (
        {f.step: digests(f.path) for f in list_step_folders(tmp_path / name)}
        for name in ("whole", "killed")
    )
    assert whole.keys() == killed.keys() == set(range(1, STEPS + 1))
    assert whole == killed
    for folder in list_step_folders(tmp_path / "whole"):
        assert (folder.path / "manifest.json").stat().st_size < 2**20
