"""Prompt templates: text with the names of columns in braces."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from files.formatting import format_name, format_value

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|([{}])")


class ColumnError(ValueError):
    """A row that lacks a column, or holds something other than text or a number there."""


class NullError(ColumnError):
    """A row without a value in a column: null, or no number where a table has numbers."""


@dataclass(frozen=True)
class Template:
    """Text in which `{column}` stands for a row's value; `{{` and `}}` are braces.

    Nothing else is understood: unlike `str.format`, a template reaches no attribute of a value.

    Raises:
        ValueError: a brace is not closed, or a column has no name.
    """

    text: str

    def __post_init__(self) -> None:
        for match in _PLACEHOLDER.finditer(self.text):
            if match[2] or match[1] == "":
                raise ValueError(
                    f"the template {self.text!r} has a lone or empty brace at {match.start()}: "
                    "write {column} for a column, and {{ or }} for a brace"
                )

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The columns it names, in order, each once."""
        return tuple(dict.fromkeys(m[1] for m in _PLACEHOLDER.finditer(self.text) if m[1]))

    @property
    def value_column(self) -> str | None:
        """The column whose value is the text, apart from white space around it."""
        match = _PLACEHOLDER.fullmatch(self.text.strip())
        return match[1] if match is not None else None

    def render(self, row: Mapping[str, Any]) -> str:
        """The text for a row.

        Raises:
            ColumnError: a column is missing or holds no text.
        """

        def value(match: re.Match[str]) -> str:
            return column_text(row, match[1]) if match[1] else match[0][0]

        return _PLACEHOLDER.sub(value, self.text)


@dataclass(frozen=True)
class Instruction:
    """The prompt of rows with `instruction` and, where there is any, `input` (Alpaca's) or
    `context` (Dolly's)."""

    columns = ("instruction",)
    optional = ("input", "context")

    def render(self, row: Mapping[str, Any]) -> str:
        """The instruction, and the input on lines after it."""
        text = column_text(row, "instruction")
        more = next((column_text(row, n) for n in self.optional if row.get(n) is not None), "")
        return f"{text}\n{more}" if more else text


def column_text(row: Mapping[str, Any], column: str) -> str:
    """The text, number or truth value in a column, as text: those of JSON as JSON writes them."""
    if column not in row:
        there = format_name(", ".join(map(str, row)) or "none")
        raise ColumnError(f"there is no column {format_value(column)}, but: {there}")
    value = row[column]
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise NullError(f"column {format_value(column)} holds null, but must hold text")
    if isinstance(value, int | float) and abs(value) < math.inf:
        return str(value)
    raise ColumnError(
        f"column {format_value(column)} holds {format_value(value)}, but must hold text"
    )
