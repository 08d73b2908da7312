"""The text of `--help`: two screens of what people look for, and all fields with `--help-all`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Container, Mapping
from typing import Any

from config.base import Leaf, Section

WIDTH = 100
"""Columns of a help text."""
HELP_AT = 36
"""Column where the meaning of a flag begins."""

SHOWN = {
    "data": "train validation prompt target labels dataset",
    "checkpoint": "save load keep_best",
    "training": "steps epochs global_batch_size optimizer.name optimizer.learning_rate.maximum "
    "optimizer.learning_rate.function optimizer.learning_rate.warmup_steps "
    "optimizer.learning_rate.warmup_proportion optimizer.weight_decay",
    "evaluation": "steps",
    "generation": "search max_tokens temperature top_k top_p beams repetition_penalty stop_strings",
    "model": "sequence_length decoder_sequence_length output_length precision",
    "execution": "micro_batch_size data_parallel tensor_parallel activations disk host_memory "
    "device",
}
"""Fields of the short help, by section."""
RARE = {
    "metrics_port", "metrics_host", "profile", "stall", "plan_json", "plan_picture", "plan_trace",
    "machine", "processes", "process", "coordinator",
}  # fmt: skip
"""Options of scripts that it leaves out."""
NOT_USED = {"finetuning": "generation", "inference": "training"}
"""By purpose of the presets: the section that the short help leaves out."""


def field_help(
    config_class: type[Section],
    data: Mapping[str, Any],
    presets: str,
    all_fields: bool,
    chosen: Collection[str] = (),
    unused: Container[str] = (),
) -> Callable[[Leaf], str]:
    """What `--help` says of each field.

    Args:
        data: of the preset; fields that it lacks have the class's values.
        presets: "finetuning", "inference", or another file's path.
        all_fields: describe every field in full; otherwise the most used ones, in a sentence each.
        chosen: dotted names of the fields that the program chooses.
        unused: those of fields that are left out.
    """
    defaults = config_class()
    shown = {f"{section}.{name}" for section in SHOWN for name in SHOWN[section].split()}
    left_out = NOT_USED.get(presets, "")

    def help_of(leaf: Leaf) -> str:
        section = leaf.dotted.partition(".")[0]
        if leaf.dotted in unused:
            return argparse.SUPPRESS
        if not all_fields and (leaf.dotted not in shown or section == left_out):
            return argparse.SUPPRESS
        value = _shown("chosen" if leaf.dotted in chosen else _value(defaults, data, leaf.dotted))
        text = leaf.doc if all_fields else _first_sentence(leaf.doc)
        return f"{text}{value}".replace("%", "%%")

    return help_of


def formatter(prog: str) -> argparse.HelpFormatter:
    """One column for flags, one for what they mean."""
    return argparse.HelpFormatter(prog, max_help_position=HELP_AT, width=WIDTH)


def _first_sentence(doc: str) -> str:
    """A doc up to its first full stop or semicolon that is in no parentheses."""
    ends = (match.start() for match in re.finditer(r"[.;] ", doc))
    whole = (doc[:end] for end in ends if doc[:end].count("(") == doc[:end].count(")"))
    return next(whole, doc).rstrip(".")


def _value(defaults: Section, data: Mapping[str, Any], dotted: str) -> Any:
    here: Any = data
    default: Any = defaults
    for name in dotted.split("."):
        default = getattr(default, name)
        here = here.get(name) if isinstance(here, Mapping) else None
    return default if here is None else here


def _shown(value: Any) -> str:
    """In brackets, after the meaning; nothing where there is no value."""
    if value is None:
        return ""
    return f" [{str(value).lower() if isinstance(value, bool) else value}]"
