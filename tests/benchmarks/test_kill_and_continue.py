"""A model larger than its memory is saved, killed, continued, exported and read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.limits import limited

ALLOCATE = "import numpy as np, sys; print(np.ones(int(sys.argv[1]), np.uint8).sum())"


def test_the_limit_is_hard():
    """A process that takes less lives, one that takes more does not."""
    codes = []
    with limited(2**28) as (_, begin):
        for nbytes in (2**26, 2**31):
            command = [sys.executable, "-c", ALLOCATE, str(nbytes)]
            env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            done = subprocess.run(command, preexec_fn=begin, env=env, capture_output=True)
            codes.append(done.returncode)
    assert codes[0] == 0
    assert codes[1] != 0


@pytest.mark.slow
def test_base_lives_on_under_a_hard_limit(tmp_path):
    """FLAN-T5 base, 248 M parameters, with 4 GB of state and 2.75 GB of memory."""
    record, folder = tmp_path / "record.jsonl", tmp_path / "folder"
    command = ["-m", "benchmarks.kill_and_continue", "base", "--folder", str(folder)]
    subprocess.run([sys.executable, *command, "--record", str(record)], check=True)
    facts = json.loads(record.read_text())
    assert facts["tensors_read_back"] > 200
    assert max(facts["peak_host_bytes"].values()) < 1.1e9 * facts["host_memory"]
    assert not list((folder / "disk").iterdir())
