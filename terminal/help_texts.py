"""Help texts of a command line, which only `--help` and `--help-all` need."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from config.base import ConfigField, flatten_by_path
from config.config_sources import AUTO_FIELDS, EPOCHS, LAYOUT, with_default_epochs_and_batch
from config.flags import FieldHelp, UnusedFields
from config.presets import merge_over, preset_names
from config.sections import RunConfig
from terminal.base_config import BaseConfig
from terminal.parser import Parser

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


def add_help_texts(
    parser: Parser, base: BaseConfig, presets: str, all_fields: bool, unused: UnusedFields
) -> Callable[[type[RunConfig]], FieldHelp]:
    """Completes a parser for `--help`; returns what makes the help texts of a section's fields.

    Args:
        all_fields: True for `--help-all`.
    """
    parser.epilog = _help_epilog(base, presets, all_fields)
    parser.formatter_class = _make_help_formatter
    if not all_fields:
        parser.hide_options(RARE)
    return partial(_make_field_help, base, presets, all_fields, unused)


def _make_field_help(
    base: BaseConfig, presets: str, all_fields: bool, unused: UnusedFields, section: type[RunConfig]
) -> FieldHelp:
    """Returns the function that makes a field's help text, with its effective default."""
    settings, defaults = with_default_epochs_and_batch(base.settings), section()
    has_auto_fields = base.settings.has_auto_fields
    values = flatten_by_path(merge_over(settings.auto_values, settings.explicit_values))
    replaced = [] if values.get(EPOCHS) is None else ["training.steps"]
    nowhere = [*replaced, *(["data.dataset"] if has_auto_fields else [])]
    nowhere += ["data.examples_per_sample"] if base.is_unspecified else []  # families differ
    open_layout = LAYOUT if settings.planner_chooses_layout and presets == "finetuning" else ()
    chosen = AUTO_FIELDS if has_auto_fields else open_layout

    def make_text(field: ConfigField) -> str:
        if field.path in unused or not (all_fields or _is_in_short_help(field.path, presets)):
            return argparse.SUPPRESS
        value = "chosen" if field.path in chosen else values.get(field.path)
        if value is None:
            value = attrgetter(field.path)(defaults)
        default_text = "" if field.path in nowhere else _format_default(value)
        text = field.doc if all_fields else _first_sentence(field.doc)
        return f"{text}{default_text}".replace("%", "%%")

    return make_text


def _is_in_short_help(field_path: str, presets: str) -> bool:
    section, _, name = field_path.partition(".")
    hidden = HIDDEN_FIELDS.get(presets, "").split()
    return name in SHORT_HELP_FIELDS.get(section, "").split() and not any(
        f"{field_path}.".startswith(f"{prefix}.") for prefix in hidden
    )


def _help_epilog(base: BaseConfig, presets: str, lists_all_presets: bool) -> str:
    """Returns the last paragraph of the help text, which lists all presets or the smallest ones."""
    used = (
        "what is used where no flag says it; the program chooses by model, data and machine"
        if base.settings.has_auto_fields
        else f"the values of {base.name}"
    )
    names = preset_names(presets)
    if lists_all_presets:
        listed = f"Presets for --config (pods: Graphcore's layouts): {', '.join(names)}"
    else:
        smallest = ", ".join(name for name in names if name.endswith("tiny"))
        listed = f"The smallest presets for --config ({len(names)} in --help-all): {smallest}"
    return f"In brackets: {used}. {listed}"


def _make_help_formatter(prog: str) -> argparse.HelpFormatter:
    """Returns an argparse help formatter with two columns: flags, and their meaning."""
    return argparse.HelpFormatter(prog, max_help_position=HELP_AT, width=WIDTH)


def _first_sentence(doc: str) -> str:
    """Returns a docstring up to the first full stop or semicolon outside parentheses."""
    ends = (match.start() for match in re.finditer(r"[.;] ", doc))
    whole = (doc[:end] for end in ends if doc[:end].count("(") == doc[:end].count(")"))
    return next(whole, doc).rstrip(".")


def _format_default(value: Any) -> str:
    """Returns a default value in brackets, or "" if the default is None."""
    if value is None:
        return ""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f" [{text.lower() if isinstance(value, bool) else text}]"
