"""The configuration of a distillation's teacher, and its head that the student's program holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

import popxl
from checkpoints.lazy_arrays import Arrays
from config.errors import ConfigError
from config.families import config_class_of_preset
from config.presets import merge_over
from config.sections import RunConfig
from config.task import Seq2SeqData
from data.token_outputs import states_dtype, top_tokens_dtype
from files.formatting import format_path
from huggingface.peft_files import find_base_model
from modelling.devices import resolve_platform
from modelling.model_family import get_family
from modelling.objectives import HiddenStates, Objective, TopTokens
from modelling.phases.teacher_head import TeacherHead
from planning.config_loader import CONFIG_LOADER

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
    given = str(config.training.teacher)
    base = find_base_model(given)
    name = given if base is None else base
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
        "training": {"global_batch_size": _samples_per_pass(config)},
        "checkpoint": {"load": name, "allow_nonfinite": config.checkpoint.allow_nonfinite},
    }
    fields = merge_over(own, of_run)
    if base is not None:
        adapter = CONFIG_LOADER.from_adapter(given, section.from_dict(fields))
        loaded = merge_over(loaded, adapter)
        adapter = {field: adapter[field] for field in OWN_FIELDS if field in adapter}
        fields = merge_over(fields, merge_over(adapter, {"adapter": {"load": given}}))
    found = replace(section.from_dict(fields), data=config.data)
    return found, loaded.get("data", {}).get("tokenizer")


def _samples_per_pass(config: RunConfig) -> int:
    """Returns the samples for which the teacher's weights are loaded once: a batch, or more."""
    e, batch = config.execution, config.training.global_batch_size
    at_once = e.micro_batch_size * e.data_parallel
    if resolve_platform(config) == "cpu":  # nothing is loaded
        return batch
    return max(batch, PASS_TOKENS // config.model.sequence_length // at_once * at_once)


def teacher_objective_and_dtype(
    config: RunConfig, of_teacher: RunConfig
) -> tuple[Objective, np.dtype]:
    """Returns what a teacher's pass computes for each loss token, and the dtype of a stored row.

    Args:
        config: the student's configuration.
    """
    training, model = config.training, of_teacher.model
    if training.top_k is None:
        dtype = popxl.dtype.from_name(model.precision).as_numpy()
        return HiddenStates(), states_dtype(model.hidden_size, dtype)
    k, vocab_size = training.top_k, config.model.output_vocab_size
    return TopTokens(k, training.rest_temperature, vocab_size), top_tokens_dtype(k)


def make_teacher_head(
    config: RunConfig,
    of_teacher: RunConfig | None = None,
    weights: Callable[[], Arrays] | None = None,
) -> TeacherHead | None:
    """Returns the teacher's head that the student's program holds; None if it holds none.

    Args:
        config: the student's configuration.
        of_teacher: see `teacher_config`; None: it is read.
        weights: returns the teacher's weights; None: for a plan.

    Raises:
        UserError: see `teacher_config`; the head has adapters.
    """
    if not config.training.has_teacher_head:
        return None
    of_teacher = of_teacher or teacher_config(config)[0]
    make_head = partial(get_family(of_teacher).build_head, of_teacher)
    held = TeacherHead(of_teacher, config.model.output_vocab_size, make_head, weights)
    held.check_supported()
    return held
