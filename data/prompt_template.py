"""Prompt templates: text with column names in braces."""

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
    """Raised for a row in which a column is missing or has a value of the wrong type."""


class NullError(ColumnError):
    """Raised for a row in which a required column is null or NaN."""


@dataclass(frozen=True)
class Template:
    """Template text with `{column}` placeholders; `{{` and `}}` are literal braces.

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
        """Column names of the template's placeholders, in order, without duplicates."""
        return tuple(dict.fromkeys(m[1] for m in _PLACEHOLDER.finditer(self.text) if m[1]))

    @property
    def single_placeholder_column(self) -> str | None:
        """Column of a template that is a single placeholder; None for other templates."""
        match = _PLACEHOLDER.fullmatch(self.text.strip())
        return match[1] if match is not None else None

    def render(self, row: Mapping[str, Any]) -> str:
        """Replace the template's placeholders by the values of a row.

        Raises:
            ColumnError: a column is missing or holds no text.
        """

        def column_value(match: re.Match[str]) -> str:
            return column_to_text(row, match[1]) if match[1] else match[0][0]

        return _PLACEHOLDER.sub(column_value, self.text)


@dataclass(frozen=True)
class Instruction:
    """Prompt template of instruction data sets such as Alpaca and Dolly.

    Their rows have `instruction` and an optional `input` (Alpaca) or `context` (Dolly).
    """

    columns = ("instruction",)
    optional = ("input", "context")

    def render(self, row: Mapping[str, Any]) -> str:
        """The instruction, followed by the optional input on a new line."""
        text = column_to_text(row, "instruction")
        extra = next((column_to_text(row, n) for n in self.optional if row.get(n) is not None), "")
        return f"{text}\n{extra}" if extra else text


def column_to_text(row: Mapping[str, Any], column: str) -> str:
    """Value of a row's column as text; numbers and booleans as in JSON."""
    if column not in row:
        columns = format_name(", ".join(map(str, row)) or "none")
        raise ColumnError(f"there is no column {format_value(column)}, but: {columns}")
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
