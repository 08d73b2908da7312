"""Compiling ahead of time: the command's JSON line."""

from __future__ import annotations

import json

import pytest

import benchmarks.compile


@pytest.mark.slow  # half a minute
def test_the_compiled_program_is_set_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--layers", "1", "--micro_batch_size", "8", "--data_parallel", "2"]
    assert benchmarks.compile.main(["--config", "gptj_tiny", *small]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["config"], found["replicas"]) == ("gptj_tiny", 2)
    assert found["compile_seconds"] > 0
    assert found["ratio"] == found["total"]["plan"] / found["total"]["xla"]
    assert 0.8 < found["ratio"] < 1.2
