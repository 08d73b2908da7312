"""Class labels: mapping of a column's values to label names.

A value is the name of a label, or its number from 0. Names that are numbers are not numbered: then
a value is the name with the same number. White space around a value stays around the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from data.file_readers import DataError
from data.prompt_template import ColumnError
from files.formatting import format_name, format_value

UNLABELED = -1
"""Value of rows without a label, in data sets with numbered labels."""

BOOLEAN_NAMES = ("false", "true")
_NUMBER = re.compile(r"-?[0-9]{1,9}(\.[0-9]{1,9})?")
_SURROUNDING_SPACE = re.compile(r"(\s*)(.*?)(\s*)", re.DOTALL)


@dataclass(frozen=True)
class ClassLabels:
    """Label names of a classification task, and the values that stand for them in data columns.

    Attributes:
        numbered_from_zero: a number is a label's index, whatever the names are, as in ClassLabel
            columns.

    Raises:
        DataError: two names are the same number.
    """

    names: tuple[str, ...]
    numbered_from_zero: bool = False

    def __post_init__(self) -> None:
        if len(self._name_by_number) < sum(_parse_number(name) is not None for name in self.names):
            raise DataError(
                f"of the labels {self._formatted_names}, two are the same number: name them apart"
            )

    @classmethod
    def parse(cls, text: str) -> ClassLabels:
        """Parse the setting `data.class_labels`.

        Raises:
            DataError: they are fewer than two, or one is empty or stands twice.
        """
        names = tuple(label.strip() for label in text.split(","))
        if len(names) < 2 or len(set(names)) < len(names) or not all(names):
            raise DataError(
                f"data.class_labels is {format_value(text)}, but must name two or more, each once, "
                "separated by commas"
            )
        return cls(names)

    def label_from_cell(self, text: str, is_column_value: bool) -> str | None:
        """Convert a column's value to its label name; None if the row is unlabeled.

        Args:
            is_column_value: the text is the value of a column, which can be a number.

        Raises:
            ColumnError: it means none of the labels, or may mean two.
        """
        leading, value, trailing = _split_surrounding_space(text)
        name: str | None = value
        if is_column_value:
            name = self._label_of_value(value)
        elif value not in self.names:
            raise self._unknown_label_error(text)
        return None if name is None else f"{leading}{name}{trailing}"

    def split_at_label(self, answer: str) -> tuple[str, str, str]:
        """Split an answer at its class label into text before, label and text after.

        The text before can be a model's reasoning.

        Raises:
            ColumnError: it ends with no label.
        """
        text = answer.rstrip()
        name = max((name for name in self.names if text.endswith(name)), key=len, default=None)
        if name is None:
            raise self._unknown_label_error(answer)
        return text.removesuffix(name), name, answer[len(text) :]

    def replace_label(self, answer: str, name: str) -> str:
        """Replace the class label in an answer."""
        prefix, _, suffix = self.split_at_label(answer)
        return f"{prefix}{name}{suffix}"

    def parse_answer(self, text: str, expected: str) -> str | None:
        """Extract the label from a generated answer; None if the text is no label.

        White space and the prefix of the expected answer are removed.
        """
        prefix = self.split_at_label(expected)[0].strip()
        name = text.strip().removeprefix(prefix).strip()
        return name if name in self.names else None

    def _label_of_value(self, value: str) -> str | None:
        """Label name that a column's value stands for; None if the value means unlabeled."""
        number = _parse_number(value)
        if value in self.names and not (self.numbered_from_zero and number is not None):
            return value
        if value.lower() in BOOLEAN_NAMES:
            return self._label_of_boolean(value)
        if number is None:
            raise self._unknown_label_error(value)
        if not self.numbered_from_zero and number in self._name_by_number:
            return self._name_by_number[number]
        if number == UNLABELED:
            return None
        if self._name_by_number and not self.numbered_from_zero:
            raise self._unknown_label_error(value, "names that are numbers are not numbered from 0")
        if number.is_integer() and 0 <= number < len(self.names):
            return self.names[int(number)]
        raise self._unknown_label_error(value, f"{len(self.names)} labels are numbered from 0")

    def _label_of_boolean(self, value: str) -> str:
        """Label name that a boolean column value stands for, in upper or lower case."""
        label = next((name for name in self.names if name.lower() == value.lower()), None)
        if label is None:
            raise self._unknown_label_error(
                value, "name them false,true to label rows by truth values"
            )
        return label

    def _unknown_label_error(self, value: str, reason: str = "") -> ColumnError:
        return ColumnError(
            f"the label {format_value(value)} is none of "
            f"{self._formatted_names}{f': {reason}' if reason else ''}"
        )

    @property
    def _formatted_names(self) -> str:
        return format_name(", ".join(self.names), 150)

    @cached_property
    def _name_by_number(self) -> dict[float, str]:
        numbers = {name: _parse_number(name) for name in self.names}
        return {number: name for name, number in numbers.items() if number is not None}

    @property
    def has_label_prefixing_another(self) -> bool:
        """True if one label name is a prefix of another one."""
        return any(a != b and a.startswith(b) for a in self.names for b in self.names)


def _split_surrounding_space(text: str) -> tuple[str, str, str]:
    """Split a text into leading white space, content and trailing white space."""
    match = _SURROUNDING_SPACE.fullmatch(text)
    assert match is not None
    return match[1], match[2], match[3]


def match_column_labels(
    names: Sequence[str], task_labels: Sequence[str], are_user_labels: bool, source_name: str
) -> ClassLabels:
    """Match the names of a ClassLabel column with the task's labels.

    Args:
        names: its own, in order.
        task_labels: the task's labels.
        are_user_labels: a person gives them, and can rename the column's.
        source_name: of the column, for messages.

    Raises:
        DataError: they are not those of the column.
    """
    if {*names} == {*task_labels}:
        return ClassLabels(tuple(names), numbered_from_zero=True)
    if are_user_labels and len(names) == len(task_labels):
        return ClassLabels(tuple(task_labels), numbered_from_zero=True)
    raise DataError(
        f"{source_name} has the labels {format_name(', '.join(names), 150)}, not "
        f"{format_name(', '.join(task_labels), 150)}: give --data.class_labels with as "
        "many, in its order"
    )


def _parse_number(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None
