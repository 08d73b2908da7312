"""Training in several processes against the same in one: losses, weights, checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoints import load_checkpoint
from checkpoints.tensor_files import digest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("processes.py")
LAYOUTS = ["2-2", "4-1", "1-4"]
ALL = [f"{preset}-{layout}" for preset in ("tiny", "gptj_tiny") for layout in LAYOUTS]


def trained(processes: int, folder: Path, *cases: str) -> dict[str, Any]:
    """What `processes` processes found, by case."""
    command = [sys.executable, "-m", "popdist.run", "--processes", str(processes), "--"]
    run = subprocess.run(
        [*command, sys.executable, str(PROGRAM), str(folder), *cases],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime/src'}"},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
    return {case: json.loads((folder / f"{processes}/{case}.json").read_text()) for case in cases}


def test_two_processes_train_as_one_does(tmp_path):
    """2 × 2 devices, 2 dp × 2 tp: each sum has two terms, so that all bits are the same."""
    case = ALL[0]
    one, two = trained(1, tmp_path, case), trained(2, tmp_path, case)
    assert two == one
    tensors = load_checkpoint(tmp_path / "2" / case).tensors
    assert len(list((tmp_path / "2" / case).glob("*/*.safetensors"))) == 2  # each wrote its own
    for name, expected in one[case]["digests"].items():
        assert digest(tensors[name]) == expected, name


@pytest.mark.slow
def test_any_layout_in_one_two_and_four_processes(tmp_path):
    """Sums of four terms depend on their order, which gloo chooses: the last bits differ."""
    found = {n: trained(n, tmp_path, *ALL) for n in (1, 2, 4)}
    for case in ALL:
        for processes in (2, 4):
            for name in ("losses", "norms"):
                several, alone = found[processes][case][name], found[1][case][name]
                assert several == pytest.approx(alone, rel=1e-6), (processes, case)
