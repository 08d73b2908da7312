"""The teacher's pass of a distillation: what it needs on a machine, and how much it stores."""

from __future__ import annotations

import math

import popxl
from config.sections import RunConfig
from files.formatting import format_bytes, format_path
from modelling.model_family import get_family
from modelling.phases.evaluation import build_loss_program, evaluated_weight_map, loss_config
from planning.hardware.machines import Machine
from planning.program_variants import with_target_device
from planning.report import PlanReport, make_report
from planning.requirements import Requirements, tokens_per_sample, weight_bytes
from planning.teacher_config import teacher_config, teacher_outputs


def plan_teacher_pass(config: RunConfig, machine: Machine) -> PlanReport | None:
    """Returns the plan of the teacher's pass over a batch; None if the objective has no teacher.

    Args:
        config: the student's configuration.
    """
    if config.training.teacher is None:
        return None
    of_teacher = loss_config(teacher_config(with_target_device(config, machine.target))[0])
    family, training = get_family(of_teacher), config.training
    objective = teacher_outputs(config, of_teacher)[0]
    weight_map = evaluated_weight_map(family.weight_map(of_teacher), objective)
    program = build_loss_program(of_teacher, family.build_phases, weight_map, objective)
    traced = popxl.plan.trace_program(program.ir, machine.target)
    samples = of_teacher.training.global_batch_size
    requirements = Requirements(
        "teacher",
        of_teacher,
        traced,
        traced.plan(),
        sum(math.prod(weight.shape) for weight in weight_map.weights),
        weight_bytes(of_teacher),
        samples,
        samples * tokens_per_sample(of_teacher),
    )
    return make_report(str(training.teacher), requirements, machine)


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
    stored = teacher_outputs(config, of_teacher)[1].itemsize
    samples, seconds = report.requirements.samples, report.expected_seconds
    return "\n".join([
        f"teacher      {format_path(report.preset)}: {report.requirements.parameters / 1e6:,.1f} M "
        f"parameters in {form}, once before the first step",
        f"fits         {'yes' if report.fits else 'no'}: {memory}",
        f"pass         {seconds:,.3f} s for {samples} samples, {samples / seconds:,.1f} samples/s",
        f"stores       {stored} bytes a loss token, {format_bytes(stored * 1e6)} a million",
    ])  # fmt: skip
