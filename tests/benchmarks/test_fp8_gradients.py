"""Distances of gradients, from vectors whose distances are known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import fp8_gradients
from benchmarks.fp8_gradients import Distances, distances, main, table

RNG = np.random.default_rng(0)


def test_distances_are_those_of_the_distributions_that_gradients_come_from():
    """1000 batches around an expected gradient, and FP8 a tenth of a length away from each."""
    expected = RNG.standard_normal((8, 50))
    expected *= 3 / np.linalg.norm(expected)
    noise = RNG.standard_normal((1000, 8, 50)) * 4 / np.sqrt(400)
    wide = [{"w": expected + n} for n in noise]
    away = RNG.standard_normal((1000, 8, 50))
    narrow = [
        {"w": g["w"] + 0.1 * np.linalg.norm(g["w"]) * a / np.linalg.norm(a)}
        for g, a in zip(wide, away, strict=True)
    ]
    found = distances(wide, narrow)["w"]
    assert found.fp8 == pytest.approx(0.1, rel=1e-6)
    assert found.batches == pytest.approx(4 / 5, rel=0.01)
    few = distances(wide[:2], narrow[:2])["w"]
    assert few.batches == pytest.approx(4 / 5, rel=0.1), "unbiased also for two batches"


def test_the_command_prints_median_and_largest(monkeypatch, capsys):
    found = {n: Distances(i / 10, i) for i, n in enumerate("abc", 1)}
    monkeypatch.setattr(fp8_gradients, "compare", lambda config, count: found)
    assert main(["--config", "tiny"]) == 0
    assert capsys.readouterr().out.strip() == table(found)
    assert "| by FP8 | 0.20 | 0.30 |" in table(found)
