"""`--record FILE` of benchmarks adds the measured metrics as a line of JSON."""

from __future__ import annotations

import json

import pytest

from benchmarks import disk_offload, kill_and_resume, soak


@pytest.mark.parametrize(
    ("module", "measure", "run"),
    [
        (soak, "run_soak_test", []),
        (kill_and_resume, "measure", ["base"]),
        (disk_offload, "measure_training", ["base_adamw"]),
    ],
)
def test_metrics_are_recorded(module, measure, run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, measure, lambda *_: {"seconds": 1.5})
    record = tmp_path / "record.jsonl"
    assert not module.main([*run, "--folder", str(tmp_path / "new"), "--record", str(record)])
    (line,) = record.read_text().splitlines()
    assert json.loads(line)["seconds"] == 1.5
