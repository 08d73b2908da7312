"""Plans of programs for samples of several lengths."""

from __future__ import annotations

import pytest

from config.presets import load_config
from config.t5 import T5Config
from planning.hardware.machines import machine
from planning.report import make_report
from planning.report_text import format_report
from planning.requirements import finetuning_requirements
from tests.slow import slow


@pytest.mark.parametrize("name", ["laptop", slow("h100")])
def test_runs_of_shorter_samples_are_simulated(name: str) -> None:
    overrides = {"model": {"layers": 2}, "data": {"length_buckets": "32,64,999"}}
    config = load_config(T5Config, "finetuning", "small", overrides)
    target = machine(name)
    report = make_report("small", finetuning_requirements(config, target.target), target)
    assert [*report.bucket_seconds] == [32, 64]
    seconds = [*report.bucket_seconds.values(), report.expected_seconds]
    assert seconds == sorted(seconds)
    assert report.as_dict()["length_buckets"] == report.bucket_seconds
    assert f"32: {seconds[0]:,.3f} s, 64: " in format_report(report)
    if name == "laptop":  # bound by compute, not by dispatch
        assert seconds[0] < 0.6 * seconds[-1]


def test_without_buckets_nothing_is_said_of_them() -> None:
    config = load_config(T5Config, "finetuning", "tiny")
    target = machine("laptop")
    report = make_report("tiny", finetuning_requirements(config), target)
    assert not report.bucket_seconds
    assert "buckets  " not in format_report(report)
