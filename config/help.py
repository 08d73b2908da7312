"""Text of `--help` (common fields on two screens) and of `--help-all` (all fields)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Container, Mapping
from typing import Any

from config.base import ConfigField, ConfigSection

WIDTH = 100
"""Columns of a help text."""
HELP_AT = 36
"""Column where the meaning of a flag begins."""

SHORT_HELP_FIELDS = {
    "data": "train validation prompt target class_labels dataset format packing loss_on "
    "examples_per_sample",
    "checkpoint": "save load keep_best",
    "training": "objective steps epochs global_batch_size optimizer.name "
    "optimizer.learning_rate.maximum optimizer.learning_rate.function "
    "optimizer.learning_rate.warmup_proportion optimizer.weight_decay",
    "adapter": "rank targets load",
    "eval": "steps",
    "generation": "search max_tokens temperature top_k top_p num_beams stop_strings",
    "model": "sequence_length decoder_sequence_length output_length precision quantization",
    "execution": "micro_batch_size data_parallel tensor_parallel activations disk device",
}
"""Fields of the short help, by section."""
RARE = {
    "metrics_port", "metrics_host", "profile", "watchdog_seconds", "plan_json", "plan_picture",
    "plan_trace", "machine", "processes", "process", "coordinator", "wandb_name", "wandb_project",
}  # fmt: skip
"""Options of scripts that it leaves out."""
HIDDEN_FIELDS = {
    "finetuning": "generation",
    "inference": "training adapter.rank adapter.alpha adapter.targets eval data.packing "
    "data.loss_on checkpoint.save checkpoint.keep_best execution.activations",
}
"""By purpose of the presets: the sections and fields that the short help leaves out."""


def make_field_help(
    config_class: type[ConfigSection],
    preset_values: Mapping[str, Any],
    presets: str,
    all_fields: bool,
    auto_fields: Collection[str] = (),
    hidden_fields: Container[str] = (),
    fields_without_default: Container[str] = (),
) -> Callable[[ConfigField], str]:
    """Returns a function that returns the help text of a configuration field.

    Args:
        preset_values: of the preset; fields that it lacks have the class's values.
        presets: "finetuning", "inference", or another file's path.
        all_fields: describe every field in full; otherwise the most used ones, in a sentence each.
        auto_fields: dotted names of the fields that the program chooses.
        hidden_fields: those of fields that are left out.
        fields_without_default: those of fields whose value is not used where no flag gives it.
    """
    defaults = config_class()
    short_help_paths = {
        f"{section}.{name}"
        for section in SHORT_HELP_FIELDS
        for name in SHORT_HELP_FIELDS[section].split()
    }
    left_out = HIDDEN_FIELDS.get(presets, "").split()

    def help_text(field: ConfigField) -> str:
        is_left_out = any(f"{field.path}.".startswith(f"{name}.") for name in left_out)
        if field.path in hidden_fields:
            return argparse.SUPPRESS
        if not all_fields and (field.path not in short_help_paths or is_left_out):
            return argparse.SUPPRESS
        value = (
            "chosen"
            if field.path in auto_fields
            else _effective_value(defaults, preset_values, field.path)
        )
        default_text = "" if field.path in fields_without_default else _format_default(value)
        text = field.doc if all_fields else _first_sentence(field.doc)
        return f"{text}{default_text}".replace("%", "%%")

    return help_text


def make_help_formatter(prog: str) -> argparse.HelpFormatter:
    """Returns an argparse help formatter with two columns: flags, and their meaning."""
    return argparse.HelpFormatter(prog, max_help_position=HELP_AT, width=WIDTH)


def _first_sentence(doc: str) -> str:
    """Returns a docstring up to the first full stop or semicolon outside parentheses."""
    ends = (match.start() for match in re.finditer(r"[.;] ", doc))
    whole = (doc[:end] for end in ends if doc[:end].count("(") == doc[:end].count(")"))
    return next(whole, doc).rstrip(".")


def _effective_value(
    defaults: ConfigSection, preset_values: Mapping[str, Any], field_path: str
) -> Any:
    here: Any = preset_values
    default: Any = defaults
    for name in field_path.split("."):
        default = getattr(default, name)
        here = here.get(name) if isinstance(here, Mapping) else None
    return default if here is None else here


def _format_default(value: Any) -> str:
    """Returns a default value in brackets, or "" if the default is None."""
    if value is None:
        return ""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f" [{text.lower() if isinstance(value, bool) else text}]"
