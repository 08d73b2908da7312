"""Rows of compared texts, for reward models: a chosen and a rejected one, perhaps with a margin.

prompt, chosen, rejected, margin     texts or lists of messages; prompt and margin may be left out
"""

from __future__ import annotations

from data.conversations import Conversation
from data.labeled_rows import read_number
from data.preference_rows import PAIR_COLUMNS, preference_columns, read_answers
from data.prompt_template import ColumnError, Template
from data.sources import Row
from files.formatting import format_name

_MARGIN = "margin"


def reward_columns(are_conversations: bool) -> set[str]:
    """Columns of a row of compared texts that are read."""
    return {*preference_columns(False, are_conversations), _MARGIN}


def read_chosen_rejected_texts(row: Row, prompt: str | None) -> list[str]:
    """Read the chosen and the rejected text of a row, each after the prompt, if there is one.

    Args:
        prompt: what precedes both, where a template says it.

    Raises:
        ColumnError: the row is of another form; NullError: it lacks a value.
    """
    if not {*PAIR_COLUMNS} <= row.keys():
        columns = format_name(", ".join(map(str, row)) or "none", 100)
        raise ColumnError(f"the columns are {columns}, but a reward needs chosen and rejected")
    if prompt is None:
        prompt = Template("{prompt}").render(row) if "prompt" in row else ""
    return [prompt + Template(f"{{{name}}}").render(row) for name in PAIR_COLUMNS]


def read_chosen_rejected_conversations(row: Row, prompt: str | None) -> list[Conversation]:
    """Read the chosen and the rejected conversation of a row; as `read_chosen_rejected_texts`."""
    answers = read_answers(row, False, prompt, are_conversations=True)
    return [answer.content for answer in answers if isinstance(answer.content, Conversation)]


def read_margin(row: Row) -> float:
    """Read by how much the chosen text's reward is to be larger; 0 if the row does not say it.

    Raises:
        ColumnError: it is no number.
    """
    value = row.get(_MARGIN)
    return 0.0 if value is None else read_number(value, _MARGIN)
