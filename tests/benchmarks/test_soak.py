"""The soak test notices lost steps and differences."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import soak
from benchmarks.soak import RunsDifferError, SoakTest
from checkpoints import CheckpointStore
from checkpoints.object_store import RemoteRun

ROWS = [
    {"step": step, "loss": 1.0 / step, "grad_norm": 2.0, "learning_rate": 1e-3}
    for step in range(1, 7)
]


def make_run(folder: Path, *steps: int, value: float = 1.0, rows: list[Any] = ROWS) -> None:
    """Create a run's folder as a run of these steps leaves it."""
    with CheckpointStore(folder) as store:
        for step in steps:
            store.save(step, {"a": np.full(9, value * step, np.float32)}, {}, wait=True)
    save = {"step": steps[-1], "checkpoint/step": steps[-1]}
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in [*rows, save]))


def create_soak(tmp_path: Path) -> SoakTest:
    """Returns a soak test whose run was disturbed after steps 3 and 6, with a mirror."""
    soak_run = SoakTest(tmp_path, random.Random(0))
    make_run(soak_run.run, 3, 6)
    for path in sorted(soak_run.run.glob("0*")):
        RemoteRun(f"file://{soak_run.mirror}").upload(path, 4)
    soak_run._check("starting from random weights")
    return soak_run


def compare_with(soak_run: SoakTest, monkeypatch: pytest.MonkeyPatch, **whole: Any) -> int:
    """Compare a soak test's run with an undisturbed one."""

    @contextmanager
    def fake_start(folder: Path, flags: Any, log: Path) -> Iterator[SimpleNamespace]:
        make_run(folder / "whole", 6, **whole)
        yield SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(soak, "_start_run", fake_start)
    return soak_run.compare()


def test_an_equal_run(tmp_path, monkeypatch):
    assert compare_with(create_soak(tmp_path), monkeypatch) == len(ROWS)


@pytest.mark.parametrize("name", soak.COMPARED)
def test_another_number_of_a_step(tmp_path, monkeypatch, name):
    rows = [*ROWS[:3], ROWS[3] | {name: 0.5}, *ROWS[4:]]
    with pytest.raises(RunsDifferError, match=f"{name} of step 4 differs"):
        compare_with(create_soak(tmp_path), monkeypatch, rows=rows)


def test_other_bits_on_the_disk(tmp_path, monkeypatch):
    with pytest.raises(RunsDifferError, match=r"the last step in .*/run differs"):
        compare_with(create_soak(tmp_path), monkeypatch, value=1.0 + 2**-23)


def test_other_bits_in_the_mirror(tmp_path, monkeypatch):
    soak_run = create_soak(tmp_path)
    shutil.rmtree(soak_run.mirror)
    make_run(tmp_path / "other", 6, value=2.0)
    RemoteRun(f"file://{soak_run.mirror}").upload(next((tmp_path / "other").glob("0*")), 4)
    with pytest.raises(RunsDifferError, match=r"the last step in .*/brought differs"):
        compare_with(soak_run, monkeypatch)


def test_a_step_that_is_lost(tmp_path):
    soak_run = create_soak(tmp_path)
    shutil.rmtree(soak_run.run / "000001-step-6")
    with pytest.raises(RunsDifferError, match="step 6 was saved, but step 3 is the newest"):
        soak_run._check("starting from step 6 in run")


def test_a_life_that_starts_elsewhere(tmp_path):
    with pytest.raises(RunsDifferError, match="a life did not start from step 6"):
        create_soak(tmp_path)._check("starting from step 3 in run")


@pytest.mark.slow
def test_a_run_that_is_disturbed_for_a_while(tmp_path):
    soak_run = soak.run_soak_test(tmp_path, 1.0, 1)
    assert soak_run["lives"] >= 2
    assert soak_run["rows_compared"] >= soak_run["steps"] > 0
