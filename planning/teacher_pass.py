"""The teacher's pass of a distillation: its configuration, and what it needs on a machine."""

from __future__ import annotations

import math
from dataclasses import replace

import popxl
from config.errors import ConfigError
from config.families import config_class_of_preset
from config.presets import merge_over
from config.sections import RunConfig
from config.task import Seq2SeqData
from data.token_outputs import top_tokens_dtype
from files.formatting import format_bytes, format_path
from modelling.devices import resolve_platform
from modelling.model_family import get_family
from modelling.objectives import TopTokens
from modelling.phases.evaluation import build_loss_program, loss_config
from planning.config_loader import CONFIG_LOADER
from planning.hardware.machines import Machine
from planning.program_variants import with_target_device
from planning.report import PlanReport, make_report
from planning.requirements import Requirements, tokens_per_sample, weight_bytes

OWN_FIELDS = ("family", "model", "adapter")
"""Sections of the teacher's configuration that are its own; the others are the student's."""

PASS_TOKENS = 2**15
"""Tokens for which computing takes longer than loading the weights from host memory."""


def teacher_config(config: RunConfig) -> tuple[RunConfig, str | None]:
    """Returns the configuration of the teacher's pass, and the name of the teacher's tokenizer.

    Args:
        config: the student's configuration.

    Raises:
        UserError: there is no such model, or it cannot read the student's samples.
    """
    name = str(config.training.teacher)
    loaded = CONFIG_LOADER.from_load(name) or CONFIG_LOADER.from_model(name)
    section = config_class_of_preset(loaded, name)
    own = {field: loaded[field] for field in OWN_FIELDS if field in loaded}
    output_field = get_family(config).sample_format.output_field
    if get_family(section()).sample_format.output_field != output_field:
        raise ConfigError(
            f"training.teacher {format_path(name)} is a {section().family}, whose samples a "
            f"{config.family} does not read: take a teacher that has "
            f"{'an encoder too' if isinstance(config.data, Seq2SeqData) else 'a decoder alone'}"
        )
    quantization = config.training.teacher_quantization
    model = {
        **{name: getattr(config.model, name) for name in ("sequence_length", output_field)},
        **({} if quantization is None else {"quantization": quantization}),
        "eval": True,
        "precision": config.model.precision,
    }
    execution = config.execution.to_dict()
    execution |= {"expert_groups": 1, "expert_parallel": False, "micro_batches_per_pass": "auto"}
    of_run = {
        "model": model,
        "execution": execution,
        "training": {"global_batch_size": _pass_samples(config)},
        "checkpoint": {"load": name, "allow_nonfinite": config.checkpoint.allow_nonfinite},
    }
    found = replace(section.from_dict(merge_over(own, of_run)), data=config.data)
    return found, loaded.get("data", {}).get("tokenizer")


def _pass_samples(config: RunConfig) -> int:
    """Returns the samples for which the teacher's weights are loaded once: a batch, or more."""
    e, batch = config.execution, config.training.global_batch_size
    at_once = e.micro_batch_size * e.data_parallel
    if resolve_platform(config) == "cpu":  # nothing is loaded
        return batch
    return max(batch, PASS_TOKENS // config.model.sequence_length // at_once * at_once)


def plan_teacher_pass(config: RunConfig, machine: Machine) -> PlanReport | None:
    """Returns the plan of the teacher's pass over a batch; None if the objective has no teacher.

    Args:
        config: the student's configuration.
    """
    if config.training.teacher is None:
        return None
    of_teacher = loss_config(teacher_config(with_target_device(config, machine.target))[0])
    family, training = get_family(of_teacher), config.training
    weight_map = family.weight_map(of_teacher)
    objective = TopTokens(training.top_k, training.rest_temperature, config.model.output_vocab_size)
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
    model = report.requirements.config.model
    form = model.precision if model.quantization is None else model.quantization
    memory = ", ".join(
        f"{name} {format_bytes(needed)} of {format_bytes(available)}"
        for name, (needed, available) in report.memory_use.items()
    )
    stored = top_tokens_dtype(config.training.top_k).itemsize
    samples, seconds = report.requirements.samples, report.expected_seconds
    return "\n".join([
        f"teacher      {format_path(report.preset)}: {report.requirements.parameters / 1e6:,.1f} M "
        f"parameters in {form}, once before the first step",
        f"fits         {'yes' if report.fits else 'no'}: {memory}",
        f"pass         {seconds:,.3f} s for {samples} samples, {samples / seconds:,.1f} samples/s",
        f"stores       {stored} bytes a loss token, {format_bytes(stored * 1e6)} a million",
    ])  # fmt: skip
