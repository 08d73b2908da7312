"""Rows of contrastive data: an anchor, a positive and any number of negatives, all texts.

anchor, positive                        two texts with the same meaning, or a query and its answer
negative, negative_1, negative_2, ...   texts that are neither
negatives                               the same as a list
"""

from __future__ import annotations

import re

from data.examples import Example
from data.prompt_template import ColumnError, NullError, Template, column_to_text
from data.row_formats import TextTemplate
from data.sources import Row
from files.formatting import format_name, format_value

ANCHOR, POSITIVE, NEGATIVES = "anchor", "positive", "negatives"

_NEGATIVE = re.compile("negative(?:_([0-9]+))?")


def read_contrastive_texts(
    row: Row, num_negatives: int, anchor: TextTemplate | None, positive: TextTemplate | None
) -> list[Example]:
    """Read anchor, positive and `num_negatives` negatives of a row, as targets of examples.

    A negative that a row does not have is an empty text. All examples have the anchor as prompt.

    Args:
        anchor, positive: templates of the texts; None: the columns of these names. That of the
            positive also renders the negatives.

    Raises:
        ColumnError: the row is of another form; NullError: it lacks a text.
    """
    anchor = anchor or Template(f"{{{ANCHOR}}}")
    positive = positive or Template(f"{{{POSITIVE}}}")
    _check_columns(row, anchor, positive)
    texts = [anchor.render(row), positive.render(row)]
    for name, text in zip(("anchor", "positive"), texts, strict=True):
        if not text.strip():
            raise ColumnError(f"the {name} is empty, but must be a text")
    negatives = read_negatives(row)[:num_negatives]
    if negatives:
        column = _document_column(positive)
        texts += [positive.render({**row, column: negative}) for negative in negatives]
    texts += [""] * (num_negatives - len(negatives))
    return [Example(texts[0], text) for text in texts]


def read_corpus_document(row: Row, positive: TextTemplate | None) -> str:
    """Read a document in a row of a corpus: the positive's column, or `text`.

    Args:
        positive: template of the text; None: the column itself.

    Raises:
        ColumnError: there is no such text.
    """
    positive = positive or Template(f"{{{POSITIVE}}}")
    if "text" in row and not {*positive.columns} <= row.keys():
        row = {**row, _document_column(positive): column_to_text(row, "text")}
    return positive.render(row)


def read_negatives(row: Row) -> list[str]:
    """Read all negatives of a row that hold a text, in order.

    Raises:
        ColumnError: one is no text.
    """
    listed = row.get(NEGATIVES)
    if isinstance(listed, str):
        listed = [listed]
    if not isinstance(listed, list | None):
        raise ColumnError(
            f"column '{NEGATIVES}' holds {format_value(listed)}, but must hold a list of texts"
        )
    items = {f"{NEGATIVES}[{i}]": value for i, value in enumerate(listed or ())}
    items |= {name: row[name] for name in _negative_columns(row)}
    return [column_to_text(items, name) for name, value in items.items() if value not in (None, "")]


def contrastive_columns(
    row: Row, anchor: TextTemplate | None, positive: TextTemplate | None
) -> set[str]:
    """Columns of a row that hold its texts."""
    anchor_columns = (ANCHOR,) if anchor is None else anchor.columns
    positive_columns = (POSITIVE,) if positive is None else positive.columns
    return {*anchor_columns, *positive_columns, NEGATIVES, *_negative_columns(row)}


def _negative_columns(row: Row) -> list[str]:
    """Names of the columns of single negatives, in the order of their numbers."""
    numbers = {name: m[1] for name in row if (m := _NEGATIVE.fullmatch(str(name)))}
    return sorted(numbers, key=lambda name: int(numbers[name] or -1))


def _check_columns(row: Row, anchor: TextTemplate, positive: TextTemplate) -> None:
    """Raise ColumnError or NullError for columns that are missing or hold no text."""
    missing = [name for name in (*anchor.columns, *positive.columns) if name not in row]
    if missing:
        columns = format_name(", ".join(map(str, row)) or "none")
        raise ColumnError(
            f"the columns are {columns}, but contrastive rows have {' and '.join(missing)}: name "
            "others by --data.prompt '{query}' --data.target '{document}'"
        )
    for name in (*anchor.columns, *positive.columns):
        if row[name] is None:
            raise NullError(f"column {format_value(name)} holds null, but must hold text")


def _document_column(template: TextTemplate) -> str:
    """Column of the positive, in whose place a template gets a negative.

    Raises:
        ColumnError: the template has several columns.
    """
    if len(template.columns) != 1:
        raise ColumnError(
            "negatives are written as data.target says, which must have one column, but has "
            f"{', '.join(template.columns) or 'none'}"
        )
    return template.columns[0]
