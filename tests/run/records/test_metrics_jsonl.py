"""metrics.jsonl: rows survive, also odd ones, interruptions and resumed runs."""

from __future__ import annotations

import json
import math
import tracemalloc

import pytest

from run.records.metrics_jsonl import MetricsFile, metric_values, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, steps, first_step=0):
    file = MetricsFile(path, first_step)
    for step in steps:
        file.append({"step": step, "loss": step / 3})


def test_rows_are_there_at_once_and_are_json(path):
    file = MetricsFile(path)
    file.append({"step": 0, "loss": 0.1})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0, "loss": 0.1}
    ]


def test_values_that_json_lacks(path):
    file = MetricsFile(path)
    file.append({"step": 0, "loss": math.nan, "norm": math.inf})
    json.loads(path.read_text(), parse_constant=pytest.fail)
    (row,) = read_metrics(path)
    assert math.isnan(row["loss"])
    assert row["norm"] == math.inf


def test_a_resumed_run_writes_the_later_steps_again(path):
    write(path, range(1, 6))
    write(path, [4, 5, 6], first_step=3)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5, 6]


def test_a_new_run_starts_empty(path):
    write(path, range(1, 6))
    write(path, [1])
    assert [row["step"] for row in read_metrics(path)] == [1]


def test_samples_are_kept_beside_the_numbers(path):
    samples = [{"prompt": "a\nb", "generated": "é", "expected": "|"}]
    MetricsFile(path).append({"step": 1, "loss": 0.5}, samples)
    MetricsFile(path, first_step=1).append({"step": 2, "loss": 0.25})
    assert read_metrics(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    assert [json.loads(line).get("samples") for line in path.read_text().splitlines()] == [
        samples,
        None,
    ]


def test_an_incomplete_last_line_is_passed_over(path):
    write(path, range(1, 3))
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    write(path, [3], first_step=2)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_columns():
    rows = [{"step": 0, "loss": 2.0}, {"step": 1}]
    assert metric_values(rows, "step") == [0, 1]
    assert metric_values(rows, "loss")[0] == 2.0
    assert math.isnan(metric_values(rows, "loss")[1])


def test_many_rows_take_little_memory(path):
    """On continuing, and for the picture."""
    row = dict.fromkeys(("loss", "learning_rate", "norm", "samples_per_second", "mfu"), 0.1)
    with path.open("w") as file:
        file.writelines(json.dumps({"step": step, **row}) + "\n" for step in range(5_000))
    content = path.read_bytes()
    tracemalloc.start()
    try:
        MetricsFile(path, 5_000)
        continuing = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        rows = read_metrics(path, ("step", "loss"))
        drawing = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.read_bytes() == content
    assert rows[-1] == {"step": 4_999, "loss": 0.1}
    assert len(rows) == 5_000
    assert continuing < len(content)
    assert drawing < 3 * len(content)
