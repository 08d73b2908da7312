"""Rows of rollouts: completions of prompts with rewards.

prompt, completion, reward            texts or messages; completions of a prompt are a group
prompt_ids, completion_ids, reward    token ids instead

Optional: group, finish_reason (length: without an end token), logprobs (of the completion's tokens,
the end token included, by the policy that wrote it).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from data.conversations import Conversation
from data.examples import Example
from data.preference_rows import (
    ANSWER_CONVERSATION_COLUMNS,
    read_answer_conversations,
    read_text_answers,
)
from data.prompt_template import ColumnError
from data.rollout import Rollout
from data.sources import Row
from files.formatting import format_value

REWARD, GROUP, LOGPROBS, FINISH_REASON = "reward", "group", "logprobs", "finish_reason"
PROMPT_IDS, COMPLETION_IDS = "prompt_ids", "completion_ids"

_MAX_LOGPROB = 1e-3
"""Largest log-probability that rounding explains."""


def rollout_columns(are_conversations: bool) -> set[str]:
    """Columns of a row that `read_rollout` uses."""
    columns = {"prompt", "completion", PROMPT_IDS, COMPLETION_IDS}
    columns |= {REWARD, GROUP, LOGPROBS, FINISH_REASON}
    return columns | (ANSWER_CONVERSATION_COLUMNS if are_conversations else set())


def read_rollout(
    row: Row, prompt: str | None, are_conversations: bool
) -> tuple[Example | Conversation, Rollout]:
    """Read a completion and what a row says of it.

    Args:
        prompt: what the model read, where a template says it.
        are_conversations: prompts and completions are messages.

    Raises:
        ColumnError: the row is of another form; NullError: it lacks a value.
    """
    has_ids = COMPLETION_IDS in row or PROMPT_IDS in row
    needed = (PROMPT_IDS, COMPLETION_IDS) if has_ids else ("prompt", "completion")
    missing = [n for n in (*needed, REWARD) if n not in row and (n != "prompt" or prompt is None)]
    if missing:
        columns = ", ".join(map(str, row)) or "none"
        raise ColumnError(
            f"the columns are {columns}, but rollouts need {', '.join((*needed, REWARD))}"
        )
    rollout = Rollout(
        _read_reward(row[REWARD]),
        _read_group(row.get(GROUP)),
        _is_truncated(row),
        _read_logprobs(row),
    )
    if has_ids:
        prompt_ids, completion_ids = (_read_token_ids(row, name) for name in needed)
        prompt_text = _as_text(row.get("prompt")) or str(prompt_ids)
        target = _as_text(row.get("completion")) or str(completion_ids)
        example = Example(prompt_text, target)
        return example, rollout.with_ids(prompt_ids, completion_ids)
    if are_conversations:
        (conversation,) = read_answer_conversations(row, ["completion"], prompt)
        return conversation, rollout
    (example,) = read_text_answers(row, ["completion"], prompt)
    return example, rollout


def _read_reward(value: Any) -> float:
    """Reward of a row; NaN if it is null, or not a number."""
    if value is None or value == "":
        return math.nan
    if isinstance(value, bool):
        return float(value)
    try:
        reward = float(value)
    except (TypeError, ValueError):
        reward = math.inf
    if math.isinf(reward):
        raise ColumnError(
            f"column '{REWARD}' holds {format_value(value)}, but must hold a finite number, or null"
        )
    return reward


def _read_group(value: Any) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str | int | float):
        raise ColumnError(
            f"column '{GROUP}' holds {format_value(value)}, but must hold text or a number"
        )
    return str(value)


def _is_truncated(row: Row) -> bool | None:
    reason = row.get(FINISH_REASON)
    if reason is None or reason == "":
        return None
    if not isinstance(reason, str):
        raise ColumnError(
            f"column '{FINISH_REASON}' holds {format_value(reason)}, but must hold text, such as "
            "stop or length"
        )
    return reason == "length"


def _read_logprobs(row: Row) -> tuple[float, ...] | None:
    if row.get(LOGPROBS) in (None, ""):
        return None
    return _read_numbers(
        row,
        LOGPROBS,
        float,
        lambda x: x <= _MAX_LOGPROB,
        "log-probabilities, finite numbers up to 0",
    )


def _read_token_ids(row: Row, name: str) -> tuple[int, ...]:
    ids = _read_numbers(row, name, int, lambda x: x >= 0, "token ids")
    if not ids:
        raise ColumnError(f"column '{name}' holds no token ids")
    return ids


def _read_numbers(row: Row, name: str, kind: type, holds: Callable[[Any], bool], noun: str) -> Any:
    """Read a list of numbers, also one that is written as JSON text."""
    values = row[name]
    if isinstance(values, str):
        try:
            values = json.loads(values)
        except ValueError:
            values = None
    kinds = (int, float) if kind is float else (int,)
    are_numbers = isinstance(values, list) and all(
        isinstance(x, kinds) and not isinstance(x, bool) and math.isfinite(x) and holds(x)
        for x in values
    )
    if not are_numbers:
        raise ColumnError(f"column '{name}' must hold a list of {noun}")
    return tuple(map(kind, values))


def _as_text(value: Any) -> str:
    """Text that stands for a value, for messages and the order of groups."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)
