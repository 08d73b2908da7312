"""Both ways of accumulating train alike, and one of them reduces once a step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import popxl
from benchmarks.accumulation import programs
from benchmarks.accumulation.__main__ import HEAD, Kept, main, row
from benchmarks.accumulation.settings import Measured, Size

ROOT = Path(__file__).parents[2]
SIZE = Size(layers=1, hidden=32, vocabulary=64, length=8, batch=16)


def test_one_of_both_ways_reduces_once():
    naive, local, big = (
        programs.reductions(programs.Program(SIZE, way, count, popxl.Ir(replication=2)).ir)
        for way, count in (("naive", 4), ("local", 4), ("local", 1))
    )
    assert local == big
    assert naive == (4 * big[0], 4 * big[1])


@pytest.mark.slow  # two programs; test_one_of_both_ways_reduces_once builds them
def test_both_ways_train_alike_and_one_reduces_once():
    naive, local = programs.measure_both(SIZE, 4, 2, 3)
    np.testing.assert_allclose(naive.losses, local.losses, rtol=1e-5)
    assert local.losses[-1] < local.losses[0]
    big = programs.Program(SIZE, "local", 1, popxl.Ir(replication=2))
    nbytes, count = programs.reductions(big.ir)
    assert (local.reductions, local.reduced) == (count, nbytes)
    assert (naive.reductions, naive.reduced) == (4 * count, 4 * nbytes)


@pytest.mark.slow
def test_processes_train_as_one_does_on_one_big_batch():
    big = programs.measure(SIZE, "local", 1, 2, 3)
    for measured in programs.measure_apart(SIZE, 4, 2, 3):
        np.testing.assert_allclose(measured.losses, big.losses, rtol=1e-5)
        assert (measured.processes, measured.devices) == (2, 2)


def test_the_command_prints_a_table_and_draws(tmp_path, capsys, monkeypatch):
    measured = {
        (way, n): Measured(way, 1, 8, n, n * share, 8, 1, [2.0])
        for way, share in (("naive", 1.0), ("local", 0.5))
        for n in (1, 32)
    }
    monkeypatch.setattr(programs, "measure", lambda size, way, n, *_: measured[way, n])
    flags = ["--processes", "1", "--counts", "1", "32", "--out", str(tmp_path)]
    assert main(flags) == 0
    assert "| 8 devices | 32 | 32.000 | 16.000 | 50% |" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "accumulation.json").read_text())["measured"]) == 4
    assert (tmp_path / "accumulation.png").stat().st_size > 1000
    measured.clear()
    assert main(flags) == 0, "what is in the file is not measured again"
    assert "| 8 devices | 1 | 1.000 | 0.500 | 50% |" in capsys.readouterr().out
    assert main([*flags, "--steps", "3"]) == 2
    assert "measurements of another size" in capsys.readouterr().err


def test_the_documents_table_is_that_of_the_record():
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    path = ROOT / "benchmarks/results/accumulation.json"
    kept = Kept(path, json.loads(path.read_text(encoding="utf-8"))["of"])
    assert HEAD in page
    rows = [row(*pair) for pair in kept.pairs.values()]
    shown = [line for line in rows if line.startswith("| 4 processes |")]
    assert shown
    assert [line for line in page.splitlines() if " processes | " in line] == shown


def test_a_batch_that_cannot_be_cut_is_refused(capsys):
    assert main(["--processes", "1", "--counts", "3"]) == 2
    assert "512 samples cannot be cut into 3 micro-batches" in capsys.readouterr().err
