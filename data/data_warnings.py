"""Warnings about content of data rows that training ignores."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from files.formatting import format_name, format_value

NOT_RENDERED = (
    "warning: the chat template does not write (--data.chat_template FILE gives another one):"
)
TOOLS_NOT_RENDERED = "warning: the chat template writes no tools:"
UNUSED_COLUMNS = "columns that are not read:"
UNUSED_NEGATIVES = "warning: rows have more than training.negatives, which are not read:"
UNUSED_FIELDS = "fields of messages that are not read:"
UNUSED_WEIGHTS = "warning: not used:"
CONTROL_TOKENS = "warning: rows hold control tokens, which the model reads as such:"
MISSING_ANSWER_PREFIX = (
    "warning: the chat template asks for answers with a beginning that these do not have:"
)


CONTEXT_CHARACTERS = 12
"""Characters shown on each side of a control token."""


class WarningCount(NamedTuple):
    """Number of data rows with a warning, an example value, and the last row's location."""

    rows: int
    example: str
    last: object = None


@dataclass
class DataWarnings:
    """Warnings about the rows of a data set, counted by warning text and column name.

    Attributes:
        control: special tokens that rows are searched for.
        refused: locations of dropped conversations, with reasons.
        template_warnings: conversations whose generation blocks and prefixes disagree.
        counts: rows by sentence and name.
    """

    control: tuple[str, ...] = ()
    refused: list[str] = field(default_factory=list)
    template_warnings: list[str] = field(default_factory=list)
    counts: dict[tuple[str, str], WarningCount] = field(default_factory=dict)

    def count_warning(self, sentence: str, name: str, location: object, value: object) -> None:
        """Count one more data row to which a warning applies.

        Args:
            location: of the row, which counts once.
            value: what it holds.
        """
        count = self.counts.get((sentence, name))
        if count is None:
            prefix = "" if location is None else f"{location}: "
            self.counts[sentence, name] = WarningCount(
                1, f"{prefix}{format_value(value)}", location
            )
        elif location is None or location != count.last:
            self.counts[sentence, name] = WarningCount(count.rows + 1, count.example, location)

    def check_row(
        self, location: object, row: Mapping[str, Any], used_columns: Collection[str]
    ) -> None:
        """Record warnings about a data row's unused columns, and special tokens in used columns."""
        for column, value in row.items():
            if column not in used_columns:
                if value is not None and value != "" and value != []:
                    self.count_warning(UNUSED_COLUMNS, format_name(column), location, value)
            elif self.control:
                for token, context in self._find_special_tokens(value).items():
                    self.count_warning(CONTROL_TOKENS, format_value(token), location, context)

    def _find_special_tokens(self, value: object) -> dict[str, str]:
        """Find special tokens in a value's strings, each with its context."""
        if isinstance(value, str):
            return {
                tokens[0]: value[
                    max(0, tokens.start() - CONTEXT_CHARACTERS) : tokens.end() + CONTEXT_CHARACTERS
                ]
                for tokens in self._special_token_regex.finditer(value)
            }
        if isinstance(value, Mapping):
            value = list(value.values())
        tokens = dict[str, str]()
        for inner in value if isinstance(value, list) else ():
            tokens |= self._find_special_tokens(inner)
        return tokens

    @cached_property
    def _special_token_regex(self) -> re.Pattern[str]:
        from data.special_tokens import compile_token_regex

        return compile_token_regex(self.control)

    def merge(self, later_warnings: DataWarnings) -> None:
        """Add warnings that were recorded about later rows of the data set."""
        self.refused += later_warnings.refused
        self.template_warnings += later_warnings.template_warnings
        for key, count in later_warnings.counts.items():
            count_so_far = self.counts.get(key)
            rows, example = (
                (count_so_far.rows, count_so_far.example) if count_so_far else (0, count.example)
            )
            self.counts[key] = WarningCount(rows + count.rows, example)

    def to_dict(self) -> dict[str, Any]:
        held = [[*key, *count[:2]] for key, count in self.counts.items()]
        return {"refused": self.refused, "template_warnings": self.template_warnings, "held": held}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DataWarnings:
        held = {(sentence, name): WarningCount(*count) for sentence, name, *count in data["held"]}
        return cls((), list(data["refused"]), list(data["template_warnings"]), held)

    def format_lines(self, printed: set[tuple[str, str]] | None = None) -> Iterator[str]:
        """Format the data warnings as sentences with row counts.

        Args:
            printed: warnings printed before, which are left out; new ones are added.
        """
        if self.refused:
            yield (
                f"warning: {len(self.refused)} conversations are left out: "
                f"{_join_first(self.refused)}"
            )
        if self.template_warnings:
            yield (
                f"warning: the generation blocks of the chat template, which count, do not mark "
                f"what answers add in {len(self.template_warnings)} conversations: "
                f"{_join_first(self.template_warnings)}"
            )
        new = dict[str, list[str]]()
        for (sentence, name), (rows, example, _) in self.counts.items():
            if printed is None or (sentence, name) not in printed:
                row_count = f"{rows} rows, such as " if rows > 1 else ""
                new.setdefault(sentence, []).append(f"{name} ({row_count}{example})")
        if printed is not None:
            printed.update(self.counts)
        for sentence, items in new.items():
            yield f"{sentence} {_join_first(items, 6)}"


def _join_first(items: list[str], max_items: int = 3) -> str:
    """Join the first items of a list to a text, which counts the other items."""
    suffix = f"; and {len(items) - max_items} more" if len(items) > max_items else ""
    return "; ".join(items[:max_items]) + suffix
