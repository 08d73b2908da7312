"""The plan of a teacher of 70 B parameters for a student of 8 B, on one consumer card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import run_finetuning
from tests.pages import ROOT, commands

PAGE = ROOT / "docs" / "own_task.md"
(COMMAND,) = (c.words[2:] for c in commands(PAGE) if "llama3_1_70B" in c.text)
SMALL_HOST = 64e9


def plan(folder: Path, *arguments: str) -> dict[str, Any]:
    """The plan of the documented command, and further arguments."""
    path = folder / "plan.json"
    assert run_finetuning.main([*COMMAND, *arguments, "--plan-json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    for part in (found, found["teacher"]):
        assert part["fits"]
        assert part["host_bytes"] < SMALL_HOST
    return found


@pytest.mark.slow
def test_adapters_learn_from_70b_as_documented(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    found = plan(tmp_path)
    text = " ".join(PAGE.read_text().split())
    said = re.search(
        r"70B reads (\d+) samples in (\d+) s, then adapters of the 8B take a step of them in "
        r"(\d+) s, on an RTX 4090 with (\d+) GB", text,
    )  # fmt: skip
    assert said is not None
    teacher = found["teacher"]
    assert found["samples"] == teacher["samples"]
    assert [*map(int, said.groups())] == [
        teacher["samples"],
        round(teacher["simulated"]["seconds"]),
        round(found["simulated"]["seconds"]),
        round(max(found["host_bytes"], teacher["host_bytes"]) / 1e9),
    ]


@pytest.mark.slow
def test_all_weights_in_compact_state_do(tmp_path: Path, monkeypatch: Any) -> None:
    """In batches of 16, the state and the activations take less than 64 GB of the host."""
    monkeypatch.chdir(ROOT)
    compact = ("--training.optimizer.state", "8bit_residual8", "--training.gradient_dtype",
               "bfloat16", "--global_batch_size", "16", "--micro_batch_size", "1")  # fmt: skip
    found = plan(tmp_path, "--adapter.rank", "0", *compact)
    assert found["samples"] == 16
    assert found["parameters"] == 8_030_261_248
    assert found["state_bytes"] / found["parameters"] == pytest.approx(7.125, abs=1e-3)
