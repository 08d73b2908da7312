"""Rows of preference data: chosen and rejected answers, or single answers with a label.

prompt, chosen, rejected      the prompt may be left out: it is what both begin with
prompt, completion, label
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from data.conversations import (
    VARIABLES_COLUMN,
    WEIGHT_FIELD,
    Conversation,
    Message,
    make_message,
    read_conversation,
    unused_fields,
)
from data.examples import Example
from data.prompt_template import ColumnError, NullError, Template
from data.sources import Row

PAIR_COLUMNS = ("chosen", "rejected")

_LABELS = {"true": True, "1": True, "false": False, "0": False}


class PreferenceAnswer(NamedTuple):
    """An answer of a row, as an example or as a conversation; `desirable`: its KTO label."""

    said: Example | Conversation
    desirable: bool | None


def preference_columns(single: bool, chat: bool) -> set[str]:
    """Columns that `read_answers` uses."""
    more = {"completion", "label"} if single else set[str]()
    return {
        "prompt",
        *PAIR_COLUMNS,
        *more,
        *({"tools", "system", VARIABLES_COLUMN} if chat else ()),
    }


def detect_answer_format(row: Row) -> Literal["prompt_completion", "conversational"]:
    """Detect if a row's answers are texts or lists of messages."""
    values = (row.get(name) for name in (*PAIR_COLUMNS, "completion", "prompt"))
    has_messages = any(isinstance(value, list) for value in values)
    return "conversational" if has_messages else "prompt_completion"


def read_answers(row: Row, single: bool, prompt: str | None, chat: bool) -> list[PreferenceAnswer]:
    """Read a row's answers: chosen and rejected, or single answers with labels.

    Args:
        single: each answer is learned for itself.
        prompt: what the model reads, where a template says it.
        chat: whether answers are conversations.

    Raises:
        ColumnError: the row is of another form; NullError: it lacks a value.
    """
    if single and "label" in row:
        given: Sequence[tuple[str, bool | None]] = [("completion", _read_label(row))]
    elif PAIR_COLUMNS[0] in row and PAIR_COLUMNS[1] in row:
        _check_not_null(row)
        given = [("chosen", True if single else None), ("rejected", False if single else None)]
    else:
        raise ColumnError(_missing_columns_message(row, single))
    columns = [name for name, _ in given]
    read: Iterable[Example | Conversation] = (
        _read_conversations(row, columns, prompt) if chat else _read_texts(row, columns, prompt)
    )
    return [
        PreferenceAnswer(one, desirable) for one, (_, desirable) in zip(read, given, strict=True)
    ]


def _missing_columns_message(row: Row, single: bool) -> str:
    there = ", ".join(map(str, row)) or "none"
    if not single and "label" in row:
        return (
            f"the columns are {there}: answers with a label are for --training.objective kto; "
            "others need chosen and rejected"
        )
    one = "prompt, completion and label, or " if single else ""
    return f"the columns are {there}, but preferences need {one}prompt, chosen and rejected"


def _check_not_null(row: Row) -> None:
    for name in PAIR_COLUMNS:
        if row[name] is None:
            raise NullError(f"column '{name}' holds null, but must hold an answer")


def _read_label(row: Row) -> bool:
    label: Any = row["label"]
    if label is None:
        raise NullError("column 'label' holds null, but must be true or false")
    found = _LABELS.get(str(label).strip().lower())
    if found is None:
        raise ColumnError(f"column 'label' holds {str(label)[:30]!r}, but must be true or false")
    return found


# ---- texts --------------------------------------------------------------------------------------
def _read_texts(row: Row, columns: Sequence[str], prompt: str | None) -> Iterator[Example]:
    answers = [Template(f"{{{name}}}").render(row) for name in columns]
    if prompt is None and "prompt" in row:
        prompt = Template("{prompt}").render(row)
    if prompt is None:
        prompt = _common_prefix(*answers)
        answers = [answer[len(prompt) :] for answer in answers]
    return (Example(prompt, answer) for answer in answers)


def _common_prefix(one: str, other: str = "") -> str:
    """Common prefix of two texts; a trailing space is left to the answers."""
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
    begin = one[: same - 1] if one[same - 1 : same] == " " else one[:same]
    if not begin:
        raise ColumnError("chosen and rejected begin differently, and there is no column prompt")
    return begin


# ---- conversations ------------------------------------------------------------------------------
def _read_conversations(row: Row, columns: Sequence[str], prompt: str | None) -> list[Conversation]:
    """Read the conversations of a row; the answers of a pair start where they differ."""
    talks = [_answer_messages(row, name) for name in columns]
    asked = _prompt_messages(row, prompt, talks)
    if asked is None:
        asked = talks[0][: _common_prefix_length(talks)]
        talks = [talk[len(asked) :] for talk in talks]
    for name, talk in zip(columns, talks, strict=True):
        if not talk or talk[-1]["role"] != "assistant":
            raise ColumnError(f"column '{name}' must end with a message of the assistant")
    if not asked:
        raise ColumnError("chosen and rejected begin differently, and there is no column prompt")
    # What was answered before is not learned.
    asked = [{**one, WEIGHT_FIELD: 0} if one["role"] == "assistant" else one for one in asked]
    listed = {
        "messages": asked,
        **{name: row.get(name) for name in ("tools", "system", VARIABLES_COLUMN)},
    }
    unread = {
        k: v for name in ("prompt", *columns) for k, v in unused_fields(row.get(name)).items()
    }
    before = replace(read_conversation(listed), unused_fields=unread)
    shared = _common_prefix_length(talks) if len(talks) > 1 else 0
    return [
        replace(before, messages=(*before.messages, *talk),
                answer_length=len(talk) - shared if len(talks) > 1 else None)
        for talk in talks
    ]  # fmt: skip


def _common_prefix_length(talks: Sequence[Sequence[Message]]) -> int:
    """Number of leading messages that two conversations share, without their last ones."""
    pairs = zip(*(talk[:-1] for talk in talks), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _prompt_messages(
    row: Row, prompt: str | None, talks: Sequence[list[Message]]
) -> list[Message] | None:
    """Messages before the answers; None: the answers' common prefix."""
    if prompt is not None:
        return [make_message("user", prompt)]
    asked = row.get("prompt")
    in_answers = isinstance(asked, str) and make_message("user", asked) in talks[0]
    if len(talks) > 1 and (asked is None or asked == [] or in_answers):
        return None
    if isinstance(asked, str) and not asked.lstrip().startswith("["):
        return [make_message("user", asked)]
    return list(read_conversation({"prompt": asked}, "prompt").messages)


def _answer_messages(row: Row, column: str) -> list[Message]:
    """Messages of an answer, which can be a string."""
    given = row.get(column)
    if isinstance(given, str) and not given.lstrip().startswith("["):
        return [make_message("assistant", given)]
    alone = {name: row[name] for name in (column,) if name in row}
    return list(read_conversation(alone, column).messages)
