"""Search of the training configuration that is fastest on a machine, by simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from config.config_sources import largest_divisor
from config.sections import RunConfig
from planning.expert_group_count import MEMORY_SHARE, active_expert_bytes, next_expert_group_count
from planning.hardware.machines import Machine
from planning.parallel_layouts import select_promising_layouts
from planning.program_variants import VariantCache
from planning.report import PlanReport, make_report
from planning.requirements import finetuning_requirements, generation_requirements, weight_bytes
from popxl.plan import gc_disabled

DISK = "DIR"
"""Placeholder for a folder of the machine's disk."""


@gc_disabled()
def plan_best_training(
    name: str, configs: Sequence[RunConfig], machine: Machine, programs: VariantCache | None = None
) -> PlanReport:
    """Return the plan of the fastest parallel layout that fits memory; if none fits, the fastest.

    `planning.parallel_layouts` lists the layouts.

    Micro-batches that do not fit the device are halved, and state that exceeds host memory is
    offloaded to disk.

    Args:
        name: name of the configuration in the report.
        programs: cache of traced programs.
    """
    programs, best = programs or VariantCache(), None
    for layout in select_promising_layouts(configs, machine, programs):
        if best is not None and best.fits and not layout.can_be_faster_than(best.expected_seconds):
            continue
        report = search_fitting_config(name, layout.config, machine, programs)
        if best is None or _sort_key(report) < _sort_key(best):
            best = report
    assert best is not None, "there is a layout"
    return best


def _sort_key(report: PlanReport) -> tuple[bool, float]:
    """Return a plan's sort key: plans that fit memory come first, then faster ones."""
    return not report.fits, report.expected_seconds


def plan_generation(name: str, config: RunConfig, machine: Machine) -> PlanReport:
    """Return the plan of generation on one device, with weights on disk if host memory is small.

    A run answers as many prompts as a training batch has samples.
    """
    single = config.with_values({f"execution.{n}": 1 for n in ("data_parallel", "tensor_parallel")})
    if single.generation.weights == "auto" and weight_bytes(single) > machine.usable_bytes:
        single = single.with_values({"generation.weights": "streamed"})
    report = make_report(name, generation_requirements(single, machine.target), machine)
    if report.fits or single.execution.disk is not None:
        return report
    on_disk = report.requirements.config.with_values({"execution.disk": DISK})
    other = make_report(name, generation_requirements(on_disk, machine.target), machine)
    return other if other.fits else report


def search_fitting_config(
    name: str, config: RunConfig, machine: Machine, programs: VariantCache
) -> PlanReport:
    """Change a configuration until its plan fits the machine's memory, and return the plan.

    While device memory is too small, it takes more expert groups if a group is large, else smaller
    micro-batches; if host memory is too small, it offloads to disk.
    """
    target = machine.target
    requirements = finetuning_requirements(config, target, programs)
    report = make_report(name, requirements, machine)
    while not report.fits:
        config = report.requirements.config
        execution, is_same_program = config.execution, False
        needed, available = report.memory_use.get("device memory", (0, 0))
        groups = (
            next_expert_group_count(config)
            if active_expert_bytes(config) > MEMORY_SHARE * needed
            else None
        )
        if needed > available and groups is not None:
            config = config.with_values({"execution.expert_groups": groups})
        elif needed > available and execution.micro_batch_size > 1:
            half = largest_divisor(execution.micro_batch_size, execution.micro_batch_size // 2)
            config = config.with_values({"execution.micro_batch_size": half})
        elif needed <= available and execution.disk is None:
            config = config.with_values({"execution.disk": DISK})
            is_same_program = machine.platform != "cpu"
        else:
            break
        if is_same_program:
            requirements = replace(requirements, config=config)
        else:
            requirements = finetuning_requirements(config, target, programs)
        report = make_report(name, requirements, machine)
    return report
