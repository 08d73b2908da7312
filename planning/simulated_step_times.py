"""Markdown tables of simulated step times of presets on machines."""

from __future__ import annotations

from dataclasses import replace

from config.families import load_finetuning_config
from planning.fit_search import plan_best_training
from planning.hardware.machines import machine
from planning.parallel_layouts import list_layouts
from planning.program_variants import VariantCache
from planning.report import PlanReport, make_report
from planning.report_text import format_bytes, format_two_digits
from planning.requirements import finetuning_requirements

StepCase = tuple[str, str, float | None]
"""A preset, a machine, and gigabytes of host memory; None: the machine's."""

STEP_TABLE_HEAD = (
    "Preset | Machine | Step | Samples/s | Matrix rate | Waits for transfers | Device | Host\n"
    "---|---|---|---|---|---|---|---"
)


LAYOUT_TABLE_HEAD = (
    "Preset | Devices | Layout | Micro-batch | A pass | Step | Samples/s\n"
    "---|---|---|---|---|---|---"
)


def layout_table_row(case: tuple[str, str, int]) -> str:
    """Format a row of the table of layouts: the parallel layout that the planner chooses.

    Args:
        case: a preset, a machine, and the number of its devices.
    """
    preset, _, devices = case
    report = plan_best_layout(*case)
    c, result = report.requirements.config, report.requirements.placement_result
    assert result is not None, "the machine has device memory"
    e, seconds = c.execution, report.expected_seconds
    cells = (
        f"`{preset}`",
        str(devices),
        f"{e.data_parallel} dp × {e.tensor_parallel} tp",
        str(e.micro_batch_size),
        f"{result.best.variant.per_pass} of {c.gradient_accumulation}",
        f"{format_two_digits(seconds)} s",
        format_two_digits(report.requirements.samples / seconds),
    )
    return " | ".join(cells)


def plan_best_layout(
    preset: str, machine_name: str, devices: int, programs: VariantCache | None = None
) -> PlanReport:
    """Return the plan of a preset's fastest parallel layout on a number of devices."""
    config = load_finetuning_config(preset)
    configs = list_layouts(config, devices, config.execution.micro_batch_size)
    return plan_best_training(preset, configs, machine(machine_name), programs)


def simulate_step(preset: str, machine_name: str, host: float | None = None) -> PlanReport:
    """Return the plan of a fine-tuning preset on a machine, with its simulated step.

    Args:
        machine_name: a machine with device memory.
        host: gigabytes of host memory; None: the machine's.

    Raises:
        UserError: there is no such preset or machine.
    """
    target = machine(machine_name)
    if host is not None:
        target = replace(target, title=f"{target.title}, {host:g} GB host", host_memory=host * 1e9)
    requirements = finetuning_requirements(load_finetuning_config(preset), target.target)
    return make_report(preset, requirements, target)


def step_table_row(case: StepCase) -> str:
    """Format a row of the table of step times, from a simulated training step."""
    report = simulate_step(*case)
    timeline = report.timeline
    assert timeline is not None, "the machine has device memory"
    cells = (
        f"`{report.preset}`",
        report.machine.title,
        f"{format_two_digits(timeline.seconds)} s",
        format_two_digits(report.requirements.samples / timeline.seconds),
        f"{report.simulated_utilisation:.0%}",
        f"{timeline.exposed_transfers / timeline.seconds:.0%}",
        format_bytes(report.device_bytes),
        format_bytes(report.bytes_per_host),
    )
    return " | ".join(cells)
