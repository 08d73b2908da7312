"""Plans that name the 8-bit optimizer state where it pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planning.fit import format_fit
from planning.hardware.machines import Machine, machine
from planning.optimizer_state_advice import FIELD, STATE
from planning.program_variants import VariantCache
from planning.report import FasterSetting, PlanReport, make_report
from planning.report_text import format_report
from planning.requirements import finetuning_requirements
from planning.speed_advice import with_speed_advice
from tests.planning.presets import preset

SMALL = replace(machine("t4"), memory=0.02e9, host_link=1e8, devices=1)
PROGRAMS = VariantCache()
"""Traced programs, which the tests share as the plans of one command do."""

LINE = "with --training.optimizer.state 8bit_residual8: "


def plan(on: Machine, **training: Any) -> PlanReport:
    """Of a model whose state takes more than the device's memory."""
    config = preset(
        "gptj_tiny",
        model={"layers": 8},
        training={"global_batch_size": 8, "stochastic_rounding": None, **training},
        execution={"micro_batch_size": 4, "activations": "recompute"},
    )
    made = make_report("small", finetuning_requirements(config, on.target, PROGRAMS), on)
    return with_speed_advice(made, PROGRAMS)


def advised_state(made: PlanReport) -> FasterSetting | None:
    found = [setting for setting in made.faster_settings if setting.field == FIELD]
    return found[0] if found else None


def test_a_plan_that_waits_for_its_state_names_a_smaller_one() -> None:
    made = plan(SMALL)
    other = advised_state(made)
    assert other is not None
    assert other.seconds < 0.95 * made.expected_seconds
    as_data = {"field": FIELD, "value": STATE, "seconds": other.seconds}
    assert as_data in made.as_dict()["faster_settings"]
    so = plan(SMALL, optimizer={"state": "8bit_residual8"})
    assert advised_state(so) is None
    assert so.expected_seconds <= 1.01 * other.seconds, "a plan of its own is at least as fast"
    line = next(x for x in format_report(made).splitlines() if LINE in x)
    assert line.startswith("faster       ")
    assert line.endswith(" s a step")
    assert "fits" not in line
    assert any(LINE in x for x in format_fit(made, 1e6))


def test_a_plan_that_does_not_fit_names_the_state_with_which_it_does() -> None:
    state = plan(SMALL).requirements.state
    short = replace(SMALL, host_memory=0.6 * state)
    made = plan(short)
    assert not made.fits
    assert f"{LINE}it fits, " in format_report(made)
    assert f"{LINE}it fits, " in "\n".join(format_fit(made, 1e6))


@pytest.mark.parametrize(
    ("on", "training"),
    [
        (machine("t4"), {}),  # all fits
        (SMALL, {"optimizer": {"name": "adafactor"}}),
        (machine("laptop"), {}),  # there is nothing to place
    ],
)
def test_others_name_none(on: Machine, training: dict[str, Any]) -> None:
    assert advised_state(plan(replace(on, devices=on.devices and 1), **training)) is None
