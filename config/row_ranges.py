"""Parsing of embedding row numbers in text, such as 32000-32003,32010."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, groupby

from config.errors import ConfigError
from config.values import split_names
from files.formatting import format_value

MAX_ROWS = 2**22
"""Rows of a range: more than any vocabulary has."""


def parse_row_ranges(text: str, field_name: str) -> tuple[int, ...]:
    """Returns the row numbers in a text of ranges and single numbers, in its order.

    Args:
        field_name: the field that has it, for messages.

    Raises:
        ConfigError: it names none, or one twice.
    """
    rows: list[int] = []
    for part in split_names(text):
        ends = part.split("-")
        known = len(ends) <= 2 and all(n.isdecimal() and len(n) < 10 for n in ends)
        first, last = (int(ends[0]), int(ends[-1])) if known else (1, 0)
        rows += range(first, last + 1) if last < first + MAX_ROWS else ()
        if not first <= last < first + MAX_ROWS or len(set(rows)) < len(rows):
            raise ConfigError(
                f"{field_name} is {format_value(text)}, but must be rows such as "
                "32000-32003,32010, each once"
            )
    return tuple(rows)


def format_row_ranges(numbers: Iterable[int]) -> str:
    """Returns row numbers as a text of ranges, which `parse_row_ranges` parses."""
    places = count()
    runs = [list(run) for _, run in groupby(numbers, lambda number: number - next(places))]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
