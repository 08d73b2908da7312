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
LONGEST = 62
"""Most characters of a field's line in the short help, its value included."""


def field_help(
    config_class: type[Section], data: Mapping[str, Any], all_fields: bool
) -> Callable[[Leaf], str]:
    """What `--help` says of each field.

    Args:
        data: of the preset; fields that it lacks have the class's values.
        all_fields: say all of all fields; otherwise a line each, of those with an alias.
    """

    defaults = config_class()

    def help_of(leaf: Leaf) -> str:
        if not all_fields and leaf.dotted not in ALIASES.values():
            return argparse.SUPPRESS
        value = _value(defaults, data, leaf.dotted)
        text = leaf.doc if all_fields else _first_clause(leaf.doc)
        return f"{text} [{_shown(value)}]".replace("%", "%%")

    return help_of


def formatter(prog: str) -> argparse.HelpFormatter:
    """One column for flags, one for what they mean."""
    return argparse.HelpFormatter(prog, max_help_position=36, width=WIDTH)


def _first_clause(doc: str) -> str:
    text = re.split(r"[.;:] ", doc, maxsplit=1)[0].rstrip(".")
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3].rsplit(' ', 1)[0]} ..."


def _value(defaults: Section, data: Mapping[str, Any], dotted: str) -> Any:
    here: Any = data
    default: Any = defaults
    for name in dotted.split("."):
        default = getattr(default, name)
        here = here.get(name) if isinstance(here, Mapping) else None
    return default if here is None else here


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
