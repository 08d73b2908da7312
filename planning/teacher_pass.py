"""The teacher's pass of a distillation: what it needs on a machine, and how much it stores."""

from __future__ import annotations

from config.sections import RunConfig
from files.formatting import format_bytes, format_path
from modelling.phases.evaluation import loss_config
from planning.hardware.machines import Machine
from planning.program_variants import with_target_device
from planning.report import PlanReport, make_report
from planning.requirements import loss_requirements
from planning.teacher_config import teacher_config, teacher_objective_and_dtype


def plan_teacher_pass(config: RunConfig, machine: Machine) -> PlanReport | None:
    """Returns the plan of the teacher's pass over a batch; None if the objective has no teacher.

    Args:
        config: the student's configuration.
    """
    if config.training.teacher is None:
        return None
    of_teacher = loss_config(teacher_config(with_target_device(config, machine.target))[0])
    objective = teacher_objective_and_dtype(config, of_teacher)[0]
    requirements = loss_requirements("teacher", of_teacher, machine.target, objective)
    return make_report(str(config.training.teacher), requirements, machine)


def format_teacher_pass(report: PlanReport, config: RunConfig) -> str:
    """Format the plan of the teacher's pass: memory, speed, and the size of what it stores.

    Args:
        config: the student's configuration.
    """
    of_teacher = report.requirements.config
    model = of_teacher.model
    form = model.precision if model.quantization is None else model.quantization
    memory = ", ".join(
        f"{name} {format_bytes(needed)} of {format_bytes(available)}"
        for name, (needed, available) in report.memory_use.items()
    )
    stored = teacher_objective_and_dtype(config, of_teacher)[1].itemsize
    samples, seconds = report.requirements.samples, report.expected_seconds
    return "\n".join([
        f"teacher      {format_path(report.preset)}: {report.requirements.parameters / 1e6:,.1f} M "
        f"parameters in {form}, once before the first step",
        f"fits         {'yes' if report.fits else 'no'}: {memory}",
        f"pass         {seconds:,.3f} s for {samples} samples, {samples / seconds:,.1f} samples/s",
        f"stores       {stored} bytes a loss token, {format_bytes(stored * 1e6)} a million",
    ])  # fmt: skip
