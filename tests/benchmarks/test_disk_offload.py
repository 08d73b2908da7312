"""Runs with state on disk are configurations, and one trains within its plan."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.disk_offload import RUNS, build_config, idle_disk
from popxl._storage.scratch_files import ScratchFolder
from popxl.errors import DiskError


def test_a_run_goes_on_with_a_disk_that_answers_at_once(tmp_path):
    """Reads return other bytes than were written, which the real disk refuses."""
    scratch = ScratchFolder(tmp_path)
    file, data = scratch.create_file(8192), np.arange(8000).astype(np.uint8)
    file.write(0, data)
    with idle_disk():
        file.read(0, np.zeros_like(data))
        file.write(0, 1 + data)
    with pytest.raises(DiskError, match="other bytes"):
        file.read(0, data)
    file.close()
    scratch.close()


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_configurations(name, tmp_path):
    config = build_config(name, str(tmp_path))
    assert config.execution.disk == str(tmp_path)
    assert config.execution.micro_batch_size == 1
    assert np.isfinite(config.execution.host_memory)


@pytest.mark.slow
def test_a_model_of_248_million_trains_within_its_plan(tmp_path):
    """FLAN-T5 base with AdamW: 4 GB of state, a limit of 2.5 GB of memory; in a process of its
    own, whose peak is what is measured."""
    record = tmp_path / "record.json"
    command = ["-m", "benchmarks.disk_offload", "base_adamw", "--folder", str(tmp_path / "disk")]
    subprocess.run([sys.executable, *command, "--record", str(record)], check=True)
    facts = json.loads(record.read_text())
    assert facts["disk_bytes"] > 1.5e9
    assert facts["peak_host_bytes"] < 1.1 * facts["planned_host_bytes"]
    assert facts["disk_written"] <= facts["disk_bytes"] * 1.1
