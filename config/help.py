"""The text of `--help`: two screens, and all fields with `--help-all`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any

from config.base import Leaf, Section
from config.flags import ALIASES

WIDTH = 100
"""Columns of a help text."""
HELP_AT = 36
"""Column where the meaning of a flag begins."""

ALSO_SHOWN = {
    "data.train",
    "data.validation",
    "data.prompt",
    "data.target",
    "data.labels",
    "evaluation.steps",
    "evaluation.patience",
    "checkpoint.keep_best",
}
"""Fields of the short help that have no alias."""
NOT_USED = {"finetuning": "generation", "inference": "training"}
"""By purpose of the presets: the section that the short help leaves out."""


def field_help(
    config_class: type[Section], data: Mapping[str, Any], presets: str, all_fields: bool
) -> Callable[[Leaf], str]:
    """What `--help` says of each field.

    Args:
        data: of the preset; fields that it lacks have the class's values.
        presets: "finetuning", "inference", or another file's path.
        all_fields: describe every field in full; otherwise the most used ones, in a line each.
    """
    defaults, shown = config_class(), ALSO_SHOWN | set(ALIASES.values())
    left_out = NOT_USED.get(presets, "")

    def help_of(leaf: Leaf) -> str:
        section = leaf.dotted.partition(".")[0]
        if not all_fields and (leaf.dotted not in shown or section == left_out):
            return argparse.SUPPRESS
        value = _shown(_value(defaults, data, leaf.dotted))
        text = leaf.doc if all_fields else _one_line(leaf.doc, WIDTH - HELP_AT - len(value))
        return f"{text}{value}".replace("%", "%%")

    return help_of


def formatter(prog: str) -> argparse.HelpFormatter:
    """One column for flags, one for what they mean."""
    return argparse.HelpFormatter(prog, max_help_position=HELP_AT, width=WIDTH)


def _one_line(doc: str, length: int) -> str:
    text = re.split(r"[.;] ", doc, maxsplit=1)[0].rstrip(".")
    return text if len(text) <= length else f"{text[: length - 3].rsplit(' ', 1)[0]} ..."


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
