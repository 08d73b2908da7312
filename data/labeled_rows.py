"""Rows of labeled texts: a text or a conversation, and its class, its classes or its number.

text, label          or what --data.prompt and --data.target name; labels is another name of label
messages, label
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from data.class_labels import ClassLabels
from data.file_readers import DataError
from data.prompt_template import ColumnError, NullError, Template
from data.row_formats import COMMON_COLUMNS, TextTemplate
from data.sources import Row
from files.formatting import format_name, format_value

Label = tuple[str, ...] | float
"""Names of a text's classes, or its number."""

MAX_CLASSES = 1000
"""Largest number of classes that are taken from the data without being named."""

_TEXT = Template("{text}")
_LABEL_COLUMNS = ("label", "labels")


def labeled_text_template(row: Row, prompt: TextTemplate | None) -> TextTemplate:
    """Template of the text in a labeled row: the configured one, or that of its columns.

    Raises:
        ColumnError: the row has no column with a usual name.
    """
    templates = [_TEXT, *(pair.prompt for pair in COMMON_COLUMNS)]
    found = prompt or next((t for t in templates if set(t.columns) <= row.keys()), None)
    if found is None:
        columns = format_name(", ".join(map(str, row)) or "none", 100)
        raise ColumnError(
            f"the columns are {columns}, but a labeled text is in the column text: name others, "
            "such as --data.prompt '{sentence}' --data.target '{stars}'"
        )
    return found


def find_label_column(row: Row, target: TextTemplate | None) -> str:
    """Column of the label in a row: the configured one, label or labels.

    Raises:
        ColumnError: there is none.
    """
    if target is not None:
        column: str | None = getattr(target, "single_placeholder_column", None)
        if column is None:
            raise ColumnError("a label is the value of one column: give --data.target '{COLUMN}'")
        names = [column]
    else:
        names = [name for name in _LABEL_COLUMNS if name in row] or [_LABEL_COLUMNS[0]]
    if names[0] not in row:
        columns = format_name(", ".join(map(str, row)) or "none", 100)
        raise ColumnError(
            f"there is no column {format_value(names[0])}, but: {columns}; --data.target "
            "'{COLUMN}' names that of the label"
        )
    return names[0]


def is_list_column(row: Row, column: str) -> bool:
    """True if this row has a list of classes in the label column."""
    return isinstance(row.get(column), list | tuple)


def read_label(row: Row, column: str, classes: ClassLabels | None, is_list: bool) -> Label | None:
    """Read the label of a row; None if it is marked as unlabeled.

    Args:
        classes: names that a label can have; None: it is a number.
        is_list: labels are lists of classes.

    Raises:
        ColumnError: the value is of another form; NullError: there is none.
    """
    value: Any = row[column]
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise NullError(f"column {format_value(column)} holds null, but must hold a label")
    if classes is None:
        return read_number(value, column)
    if isinstance(value, list | tuple) != is_list:
        other = "one class, but the first row a list" if is_list else "a list, but must be a class"
        raise ColumnError(
            f"column {format_value(column)} holds {other}: give --training.multi_label true and a "
            "list in each row, or false and one class"
        )
    names = [classes.label_from_cell(cell, True) for cell in _label_texts(value)]
    return None if None in names else tuple(dict.fromkeys(name for name in names if name))


def read_number(value: Any, column: str) -> float:
    """Read a finite number.

    Raises:
        ColumnError: the value is none.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or abs(number) > 3e38:
        raise ColumnError(
            f"column {format_value(column)} holds {format_value(value)}, but must hold a number"
        )
    return number


def _label_texts(value: Any) -> list[str]:
    """Texts of a label: of one class, or of each class in a list."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    for one in values:
        if not isinstance(one, str | bool | int) and not (
            isinstance(one, float) and one.is_integer()
        ):
            raise ColumnError(
                f"a label is {format_value(one)}, but must be the name or number of a class; for "
                "numbers, give --training.objective regression"
            )
    return [str(int(v)) if isinstance(v, float) else str(v).strip() for v in values]


def collect_classes(values: Iterable[Any], column: str) -> tuple[str, ...]:
    """Names of the classes that labels of data have, sorted, numbers by value.

    Raises:
        DataError: they are fewer than two, too many, or one has a comma.
    """
    names = dict[str, None]()
    for value in values:
        if value is not None and not (isinstance(value, float) and math.isnan(value)):
            names |= dict.fromkeys(_label_texts(value))
        if len(names) > MAX_CLASSES:
            raise DataError(
                f"column {format_value(column)} has more than {MAX_CLASSES} labels: name them with "
                "--data.class_labels, or give --training.objective regression for numbers"
            )
    names.pop("-1", None)  # without a label, as in data sets of the hub
    numbered = all(name.isdecimal() for name in names)
    ordered = sorted(names, key=int) if numbered else sorted(names)
    wrong = next((name for name in ordered if "," in name or not name), None)
    if wrong is not None:
        raise DataError(f"the label {format_value(wrong)} is empty or has a comma: rename it")
    if len(ordered) < 2:
        found = format_name(", ".join(ordered)) or "none"
        raise DataError(
            f"column {format_value(column)} has one label, {found}, but a classification needs two "
            "or more: name them with --data.class_labels"
        )
    return tuple(ordered)
