"""A model larger than its memory is saved, killed, resumed, exported and read back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from benchmarks import kill_and_resume
from benchmarks.kill_and_resume import limit_memory
from checkpoints.step_folders import list_step_folders
from tests.planning.presets import preset

ALLOCATE = "import numpy as np, sys; print(np.ones(int(sys.argv[1]), np.uint8).sum())"


# The child does nothing but set its limits and start; no lock of JAX's threads is taken.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_the_limit_is_hard():
    """A process below the limit lives, one above it dies."""
    codes = []
    with limit_memory(2**28) as (_, begin):
        for nbytes in (2**26, 2**31):
            command = [sys.executable, "-c", ALLOCATE, str(nbytes)]
            env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            done = subprocess.run(command, preexec_fn=begin, env=env, capture_output=True)
            codes.append(done.returncode)
    assert codes[0] == 0
    assert codes[1] != 0


@pytest.mark.slow
def test_what_the_processes_do(tmp_path, capsys, monkeypatch):
    """With a tiny model, one after the other in this process; the second step is lost."""
    monkeypatch.setattr("planning.hardware.disk_offload.check_memory_limit", lambda *args: None)
    folders = kill_and_resume.MeasurementFolders(tmp_path)
    config = preset(
        "tiny",
        model={"layers": 1, "hidden_size": 64, "d_ff": 64},
        training={"global_batch_size": 4},
        execution={"micro_batch_size": 2, "disk": folders.disk, "host_memory": 0.001},
        checkpoint={"save": str(folders.run)},
    )
    lines_by_child = {}
    for name, child in kill_and_resume.CHILDREN.items():
        child(config, folders)
        lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("{")]
        lines_by_child[name] = [json.loads(line) for line in lines]
        if name == "train":
            newest = list_step_folders(folders.run)[0]
            assert newest.step == 2
            shutil.rmtree(newest.path)
    first, second = (fact for fact in lines_by_child["train"] if "loss" in fact)
    (resumed,) = (fact for fact in lines_by_child["resume"] if "loss" in fact)
    assert {**resumed, "peak": 0} == {**second, "peak": 0}
    assert first["loss"] != second["loss"]
    (back,) = lines_by_child["read_back"]
    assert back["wrong"] == []
    assert back["tensors"] > 20


@pytest.mark.slow
def test_base_lives_on_under_a_hard_limit(tmp_path):
    """FLAN-T5 base, 248 M parameters, with 4 GB of state and 2.75 GB of memory."""
    record, folder = tmp_path / "record.jsonl", tmp_path / "folder"
    command = ["-m", "benchmarks.kill_and_resume", "base", "--folder", str(folder)]
    subprocess.run([sys.executable, *command, "--record", str(record)], check=True)
    metrics = json.loads(record.read_text())
    assert metrics["tensors_read_back"] > 200
    assert max(metrics["peak_host_bytes"].values()) < 1.1e9 * metrics["host_memory"]
    assert not list((folder / "disk").iterdir())
