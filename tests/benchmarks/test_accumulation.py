"""Both ways of gradient accumulation train equally; one reduces once per step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import popxl
from benchmarks import accumulation_programs as programs
from benchmarks.accumulation import TABLE_HEAD, MeasurementFile, format_row, main, plan_reductions
from benchmarks.accumulation_programs import AccumulationRun, ModelAndBatchSize
from planning.hardware.machines import machine

ROOT = Path(__file__).parents[2]
SIZE = ModelAndBatchSize(layers=1, hidden=32, vocabulary=64, length=8, batch=16)


def test_one_of_both_ways_reduces_once():
    naive, local, big = (
        programs.list_reductions(
            programs.AccumulationProgram(SIZE, method, count, popxl.Ir(replication=2)).ir
        )
        for method, count in (("naive", 4), ("local", 4), ("local", 1))
    )
    assert local == big
    assert naive == (4 * big[0], 4 * big[1])


@pytest.mark.slow  # two programs; test_one_of_both_ways_reduces_once builds them
def test_both_ways_train_alike_and_one_reduces_once():
    naive, local = programs.measure_both(SIZE, 4, 2, 3)
    np.testing.assert_allclose(naive.losses, local.losses, rtol=1e-5)
    assert local.losses[-1] < local.losses[0]
    big = programs.AccumulationProgram(SIZE, "local", 1, popxl.Ir(replication=2))
    nbytes, count = programs.list_reductions(big.ir)
    assert (local.reductions, local.reduced) == (count, nbytes)
    assert (naive.reductions, naive.reduced) == (4 * count, 4 * nbytes)


@pytest.mark.slow
def test_processes_train_as_one_does_on_one_big_batch():
    big = programs.measure_run(SIZE, "local", 1, 2, 3)
    for measured in programs.measure_in_processes(SIZE, 4, 2, 3):
        np.testing.assert_allclose(measured.losses, big.losses, rtol=1e-5)
        assert (measured.processes, measured.devices) == (2, 2)


def test_the_command_prints_a_table_and_draws(tmp_path, capsys, monkeypatch):
    measured = {
        (method, n): AccumulationRun(method, 1, 8, n, n * share, 8, 1, [2.0])
        for method, share in (("naive", 1.0), ("local", 0.5))
        for n in (1, 32)
    }
    monkeypatch.setattr(programs, "measure_run", lambda size, method, n, *_: measured[method, n])
    flags = ["--processes", "1", "--counts", "1", "32", "--out", str(tmp_path)]
    assert main(flags) == 0
    assert "8 devices | 32 | 32.000 | 16.000 | 50% |" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "accumulation.json").read_text())["measured"]) == 4
    assert (tmp_path / "accumulation.png").stat().st_size > 1000
    measured.clear()
    assert main(flags) == 0, "what is in the file is not measured again"
    assert "8 devices | 1 | 1.000 | 0.500 | 50% |" in capsys.readouterr().out
    assert main([*flags, "--steps", "3"]) == 2
    assert "measurements of another size" in capsys.readouterr().err


def test_the_documents_table_is_that_of_the_record():
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    path = ROOT / "benchmarks/results/accumulation.json"
    file = MeasurementFile(path, json.loads(path.read_text(encoding="utf-8"))["of"])
    assert TABLE_HEAD in page
    rows = [format_row(*pair) for pair in file.pairs.values()]
    shown = [line for line in rows if line.startswith("4 processes |")]
    assert shown
    assert [line for line in page.splitlines() if " processes | " in line] == shown


def test_a_batch_that_cannot_be_cut_is_refused(capsys):
    assert main(["--processes", "1", "--counts", "3"]) == 2
    assert "512 samples cannot be cut into 3 micro-batches" in capsys.readouterr().err


# ---- plans ---------------------------------------------------------------------------------------
DOCUMENT = ("--layers", "12", "--hidden_size", "768", "--sequence_length", "512", "--batch", "512",
            "--devices", "8", "--plan")  # fmt: skip


def test_a_plan_counts_reductions_and_their_seconds(capsys):
    """A reduction for each weight: 8 of a GPT-J layer and 5 around the layers."""
    size = ("--layers", "2", "--hidden_size", "32", "--vocabulary", "64", "--batch", "64")
    assert main([*size, "--devices", "2", "--counts", "4", "8", "--plan"]) == 0
    rows = [[cell.strip() for cell in line.split("|")]
            for line in capsys.readouterr().out.splitlines()[2:]]  # fmt: skip
    assert [(format_row[0], format_row[1], format_row[4]) for format_row in rows] == [
        ("4", "84", "21"),
        ("8", "168", "21"),
    ]
    assert [format_row[7] for format_row in rows] == ["-", "-"]
    (plan,) = plan_reductions(
        ModelAndBatchSize(layers=2, hidden=32, batch=64), [4], 2, machine("h100")
    )
    weights = 2 * 32 * 512 + 512 + 64 + 2 * (64 + 4 * 32 * 32 + 2 * 32 * 128 + 32 + 128)
    assert plan.local.nbytes == 4 * weights
    assert plan.naive.sent == plan.naive.nbytes == 4 * plan.local.nbytes, "two send a half twice"
    assert plan.naive.seconds == pytest.approx(plan.naive.sent / (0.8 * 450e9))


@pytest.mark.slow
def test_the_plan_of_the_documents_model_is_that_of_the_page(capsys):
    assert main([*DOCUMENT]) == 0
    lines = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert " ".join(DOCUMENT) in page
    rows = [line.split(" | ") for line in lines[2:]]
    assert [row[1] for row in rows] == ["3,232", "6,464"]
    assert {row[4] for row in rows} == {"101"}
    (first, reduced), (second, _) = ((row[2], row[5]) for row in rows)
    assert f"reduces {first} and {second} GB instead of {reduced};" in " ".join(page.split())
    assert [round(float(row[7])) for row in rows] == [26, 25]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--plan", "--counts", "3"], "cut into 3 micro-batches on 8 devices"),
        (["--hidden_size", "30"], "--hidden_size 30 must be a multiple of --heads 4"),
        (["--hidden_size", "16"], "8 features or more"),
        (["--plan", "--machine", "tpu_v9"], "tpu_v9"),
        (["--steps", "1"], "--steps must be 2 or more"),
    ],
)
def test_sizes_that_cannot_be_are_refused(flags, said, capsys):
    assert main(flags) == 2
    assert said in capsys.readouterr().err
