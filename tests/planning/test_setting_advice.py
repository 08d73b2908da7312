"""Plans that name a faster micro-batch, or another dtype of stored gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from config.sections import RunConfig
from planning.fit import format_fit
from planning.hardware.machines import Machine, machine
from planning.program_variants import VariantCache
from planning.report import PlanReport, make_report
from planning.report_text import format_report
from planning.requirements import finetuning_requirements
from planning.speed_advice import with_speed_advice
from tests.planning.presets import preset

MICRO, SUMS = "execution.micro_batch_size", "training.gradient_dtype"
LARGE = replace(machine("h100"), devices=1)
PROGRAMS = VariantCache()
"""Traced programs, which the tests share as the plans of one command do."""


def small(
    micro: int, batch: int = 8, hidden_size: int = 32, per_pass: int | str = "auto", **training: Any
) -> RunConfig:
    return preset(
        "gptj_tiny",
        model={"layers": 1, "hidden_size": hidden_size},
        training={"global_batch_size": batch, **training},
        execution={
            "micro_batch_size": micro,
            "activations": "recompute",
            "micro_batches_per_pass": per_pass,
        },
    )


def plan(config: RunConfig, on: Machine = LARGE) -> PlanReport:
    made = make_report("small", finetuning_requirements(config, on.target, PROGRAMS), on)
    return with_speed_advice(made, PROGRAMS)


def advice(made: PlanReport) -> dict[str, tuple[str | int, float]]:
    return {each.field: (each.value, each.seconds) for each in made.faster_settings}


def test_a_larger_micro_batch_is_named_and_takes_the_time_that_is_said() -> None:
    made = plan(small(2))
    size, seconds = advice(made)[MICRO]
    assert size == 8, "it goes on while that pays"
    assert seconds < 0.9 * made.expected_seconds
    taken = plan(small(8))
    assert taken.expected_seconds == pytest.approx(seconds, rel=0.005)
    assert MICRO not in advice(taken)
    text = f"with --execution.micro_batch_size 8: {seconds:,.3g} s a step"
    assert f"\nfaster       {text}\n" in format_report(made)
    assert f"faster      {text}" in format_fit(made, 1e6)
    assert {"field": MICRO, "value": 8, "seconds": seconds} in made.as_dict()["faster_settings"]


def test_only_divisors_of_the_batch_are_named() -> None:
    assert MICRO not in advice(plan(small(3, 9)))


def test_a_plan_that_does_not_fit_names_the_micro_batch_with_which_it_does() -> None:
    little = replace(LARGE, memory=6e6)
    made = plan(small(16, 16), little)
    assert not made.fits
    size, seconds = advice(made)[MICRO]
    assert 1 <= int(size) < 8, "of 8 samples it does not fit"
    assert f"with --{MICRO} {size}: it fits, " in format_report(made)
    taken = plan(small(int(size), 16), little)
    assert taken.fits
    assert taken.expected_seconds <= 1.005 * seconds


@pytest.mark.slow
def test_a_plan_of_rounded_sums_names_the_faster_ones() -> None:
    """They are rounded once a pass."""
    made = plan(small(1, 4, 2048, 1, gradient_dtype="bfloat16"))
    dtype, seconds = advice(made)[SUMS]
    assert dtype == "float32"
    taken = plan(small(1, 4, 2048, 1))
    assert taken.expected_seconds == pytest.approx(seconds, rel=0.005)
    assert SUMS not in advice(taken)


def test_a_plan_that_does_not_fit_names_smaller_sums() -> None:
    short = replace(LARGE, memory=1.3e9, host_memory=8e8)  # of 0.85e9, or 0.75e9
    made = plan(small(8, 8, 2048), short)
    assert not made.fits
    assert advice(made)[SUMS][0] == "bfloat16"
    assert f"with --{SUMS} bfloat16: it fits, " in format_report(made)


def test_a_cpu_has_none() -> None:
    assert not plan(small(1), machine("laptop")).faster_settings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "machine_name"),
    [
        ("gptj_6B_gpu", "h200"), ("gptj_6B_gpu_fp8", "h200"), ("xxl_gpu", "h100"),
        ("llama3_1_8B", "h100"), ("qwen3_0_6B", "h200"),
    ],
)  # fmt: skip
def test_the_presets_take_the_time_that_is_said(name: str, machine_name: str) -> None:
    on = replace(machine(machine_name), devices=1)
    made = plan(preset(name), on)
    for field, (value, seconds) in advice(made).items():
        assert seconds < 0.99 * made.expected_seconds
        if field == MICRO:
            taken = plan(preset(name).with_values({field: value}), on)
            assert taken.fits
            assert taken.expected_seconds == pytest.approx(seconds, rel=0.005)
