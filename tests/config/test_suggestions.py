"""Unknown flags and fields are answered with the one that is meant; so are earlier spellings."""

from __future__ import annotations

import argparse

import pytest

import run_generation
from config.errors import ConfigError, find_similar_names
from config.families import FAMILIES
from config.flags import normalize_flag_spelling
from config.unknown_flags import check_foreign_flags
from run.options import RunOptions

RENAMED = {
    "t5": (
        ("beams", "num_beams"),
        ("checkpoint.base", "checkpoint.base_model"),
        ("checkpoint.nonfinite", "checkpoint.allow_nonfinite"),
        ("data.labels", "data.class_labels"),
        ("data.long_targets", "data.on_long_target"),
        ("data.nulls", "data.on_null"),
        ("evaluation.constrained", "eval.constrained"),
        ("evaluation.log_samples", "eval.log_samples"),
        ("evaluation.metrics", "eval.metrics"),
        ("evaluation.patience", "eval.patience"),
        ("evaluation.samples", "eval.samples"),
        ("evaluation.steps", "eval.steps"),
        ("examples_per_row", "examples_per_sample"),
        ("execution.packed", "execution.quantized_cache"),
        ("fp8.amax_history", "fp8.amax_history_len"),
        ("fp8.amax_of", "fp8.amax_compute_algo"),
        ("fresh", "overwrite"),
        ("generation.beams", "num_beams"),
        ("model.gated", "model.is_gated_act"),
        ("model.quantisation", "quantization"),
        ("model.quantisation_group_size", "model.quantization_group_size"),
        ("model.scaled_head", "model.scale_decoder_outputs"),
        ("quantisation", "quantization"),
        ("raw", "no_template"),
        ("stall", "watchdog_seconds"),
        ("training.gradients", "training.gradient_dtype"),
        ("training.optimizer.learning_rate.cycles",
         "training.optimizer.learning_rate.num_cycles"),
        ("training.optimizer.learning_rate.first_step",
         "training.optimizer.learning_rate.start_step"),
        ("training.reference", "training.reference_cache"),
        ("training.trained", "training.trainable"),
    ),
    "gptj": (
        ("data.loss", "data.loss_on"),
        ("model.max_length", "model.max_position_embeddings"),
    ),
    "llama": (("model.part_of", "model.multimodal_parent"),),
}  # fmt: skip
"""By family: earlier spellings of flags, and those of today."""


def options() -> list[str]:
    parser = argparse.ArgumentParser()
    RunOptions.add_flags(parser)
    run_generation._add_options(parser)
    return [flag for action in parser._actions for flag in action.option_strings]


def suggestion(family: str, flag: str) -> str:
    """The message about an unknown flag; "": it is known."""
    try:
        check_foreign_flags([flag, "1"])
        normalize_flag_spelling([flag, "1"], FAMILIES[family].config, options())
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [(family, *pair) for family, pairs in RENAMED.items() for pair in pairs],
)
def test_an_earlier_flag_is_answered_with_the_new_one(family: str, old: str, new: str) -> None:
    assert f"--{new}" in suggestion(family, f"--{old}").rstrip("?").split()


@pytest.mark.parametrize(
    ("section", "old", "new"),
    [
        ("", "evaluation", "eval"),
        ("data", "nulls", "on_null"),
        ("data", "labels", "class_labels"),
        ("data", "examples_per_row", "examples_per_sample"),
        ("checkpoint", "base", "base_model"),
        ("fp8", "amax_history", "amax_history_len"),
        ("model", "gated", "is_gated_act"),
        ("training", "trained", "trainable"),
    ],
)
def test_an_earlier_field_is_answered_with_the_new_one(section: str, old: str, new: str) -> None:
    fields = {section: {old: 1}} if section else {old: {}}
    with pytest.raises(ConfigError, match=rf"unknown field .*did you mean .*\b{new}\b.*\?"):
        FAMILIES["t5"].config.from_dict(fields)


def test_close_names() -> None:
    known = ["eval", "generation", "execution", "base_model", "is_gated_act", "steps", "to"]
    assert find_similar_names("evaluation", known)[0] == "eval"
    assert find_similar_names("base", known) == ["base_model"]
    assert find_similar_names("gated", known) == ["is_gated_act"]
    assert find_similar_names("step", known) == ["steps"]
    assert find_similar_names("e", known) == find_similar_names("xyzzy", known) == []
