"""Rows of preference data: chosen and rejected answers, or single answers with a KTO label.

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
    find_unused_fields,
    make_message,
    read_conversation,
)
from data.examples import Example
from data.prompt_template import ColumnError, NullError, Template
from data.sources import Row

PAIR_COLUMNS = ("chosen", "rejected")

_LABELS = {"true": True, "1": True, "false": False, "0": False}


class PreferenceAnswer(NamedTuple):
    """One answer in a row of preference data, as an example or as a conversation.

    `desirable` is its KTO label.
    """

    content: Example | Conversation
    desirable: bool | None


ANSWER_CONVERSATION_COLUMNS = {"tools", "system", VARIABLES_COLUMN}
"""Columns of a row whose answers are conversations that `read_answer_conversations` uses."""


def preference_columns(unpaired: bool, are_conversations: bool) -> set[str]:
    """Columns of a row of preference data that `read_answers` uses."""
    label_columns = {"completion", "label"} if unpaired else set[str]()
    chat_columns = ANSWER_CONVERSATION_COLUMNS if are_conversations else set[str]()
    return {"prompt", *PAIR_COLUMNS, *label_columns, *chat_columns}


def detect_answer_format(row: Row) -> Literal["prompt_completion", "conversational"]:
    """Detect whether the answers in a row of preference data are texts or lists of messages."""
    values = (row.get(name) for name in (*PAIR_COLUMNS, "completion", "prompt"))
    has_messages = "completion_ids" not in row and any(isinstance(value, list) for value in values)
    return "conversational" if has_messages else "prompt_completion"


def read_answers(
    row: Row, unpaired: bool, prompt: str | None, are_conversations: bool
) -> list[PreferenceAnswer]:
    """Read the answers in a row of preference data: chosen and rejected, or labeled ones.

    Args:
        unpaired: rows have single answers with labels.
        prompt: what the model reads, where a template says it.
        are_conversations: whether answers are conversations.

    Raises:
        ColumnError: the row is of another form; NullError: it lacks a value.
    """
    if unpaired and "label" in row:
        labels: Sequence[tuple[str, bool | None]] = [("completion", _read_desirable_label(row))]
    elif PAIR_COLUMNS[0] in row and PAIR_COLUMNS[1] in row:
        _check_not_null(row)
        labels = [("chosen", True if unpaired else None), ("rejected", False if unpaired else None)]
    else:
        raise ColumnError(_missing_columns_message(row, unpaired))
    columns = [name for name, _ in labels]
    answers: Iterable[Example | Conversation] = (
        read_answer_conversations(row, columns, prompt)
        if are_conversations
        else read_text_answers(row, columns, prompt)
    )
    return [
        PreferenceAnswer(answer, desirable)
        for answer, (_, desirable) in zip(answers, labels, strict=True)
    ]


def _missing_columns_message(row: Row, unpaired: bool) -> str:
    columns = ", ".join(map(str, row)) or "none"
    if not unpaired and "label" in row:
        return (
            f"the columns are {columns}: answers with a label are for --training.objective kto; "
            "others need chosen and rejected"
        )
    alternative = "prompt, completion and label, or " if unpaired else ""
    return (
        f"the columns are {columns}, but preferences need {alternative}prompt, chosen and rejected"
    )


def _check_not_null(row: Row) -> None:
    for name in PAIR_COLUMNS:
        if row[name] is None:
            raise NullError(f"column '{name}' holds null, but must hold an answer")


def _read_desirable_label(row: Row) -> bool:
    label: Any = row["label"]
    if label is None:
        raise NullError("column 'label' holds null, but must be true or false")
    value = _LABELS.get(str(label).strip().lower())
    if value is None:
        raise ColumnError(f"column 'label' holds {str(label)[:30]!r}, but must be true or false")
    return value


# ---- texts --------------------------------------------------------------------------------------
def read_text_answers(row: Row, columns: Sequence[str], prompt: str | None) -> Iterator[Example]:
    """Read the texts of answers in a row; without a prompt it is what they begin with."""
    texts = [Template(f"{{{name}}}").render(row) for name in columns]
    if prompt is None and "prompt" in row:
        prompt = Template("{prompt}").render(row)
    if prompt is None:
        prompt = _common_prefix(*texts)
        texts = [text[len(prompt) :] for text in texts]
    return (Example(prompt, text) for text in texts)


def _common_prefix(first: str, second: str = "") -> str:
    """Common prefix of two texts, from which a trailing space is left out."""
    length = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))
    prefix = first[: length - 1] if first[length - 1 : length] == " " else first[:length]
    if not prefix:
        raise ColumnError("chosen and rejected begin differently, and there is no column prompt")
    return prefix


# ---- conversations ------------------------------------------------------------------------------
def read_answer_conversations(
    row: Row, columns: Sequence[str], prompt: str | None
) -> list[Conversation]:
    """Read a row's conversations; the two answers start at their first different message."""
    conversations = [_answer_messages(row, name) for name in columns]
    prompt_messages = _prompt_messages(row, prompt, conversations)
    if prompt_messages is None:
        prompt_messages = conversations[0][: _count_common_messages(conversations)]
        conversations = [messages[len(prompt_messages) :] for messages in conversations]
    for name, messages in zip(columns, conversations, strict=True):
        if not messages or messages[-1]["role"] != "assistant":
            raise ColumnError(f"column '{name}' must end with a message of the assistant")
    if not prompt_messages:
        raise ColumnError("chosen and rejected begin differently, and there is no column prompt")
    # Earlier answers are not in the loss.
    prompt_messages = [
        {**message, WEIGHT_FIELD: 0} if message["role"] == "assistant" else message
        for message in prompt_messages
    ]
    prompt_row = {
        "messages": prompt_messages,
        **{name: row.get(name) for name in ("tools", "system", VARIABLES_COLUMN)},
    }
    unused = {
        k: v for name in ("prompt", *columns) for k, v in find_unused_fields(row.get(name)).items()
    }
    prompt_conversation = replace(read_conversation(prompt_row), unused_fields=unused)
    num_shared = _count_common_messages(conversations) if len(conversations) > 1 else 0
    return [
        replace(prompt_conversation, messages=(*prompt_conversation.messages, *messages),
                answer_length=len(messages) - num_shared if len(conversations) > 1 else None)
        for messages in conversations
    ]  # fmt: skip


def _count_common_messages(conversations: Sequence[Sequence[Message]]) -> int:
    """Count the leading messages that two conversations share, except their last ones."""
    message_pairs = zip(*(messages[:-1] for messages in conversations), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], message_pairs)))


def _prompt_messages(
    row: Row, prompt: str | None, conversations: Sequence[list[Message]]
) -> list[Message] | None:
    """Messages before the answers; None if the answers' common prefix is the prompt."""
    if prompt is not None:
        return [make_message("user", prompt)]
    column = row.get("prompt")
    repeats_prompt = isinstance(column, str) and make_message("user", column) in conversations[0]
    if len(conversations) > 1 and (column is None or column == [] or repeats_prompt):
        return None
    if isinstance(column, str) and not column.lstrip().startswith("["):
        return [make_message("user", column)]
    return list(read_conversation({"prompt": column}, "prompt").messages)


def _answer_messages(row: Row, column: str) -> list[Message]:
    """Messages of an answer in a row, given as a list of messages or as a text."""
    value = row.get(column)
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return [make_message("assistant", value)]
    answer_row = {name: row[name] for name in (column,) if name in row}
    return list(read_conversation(answer_row, column).messages)
