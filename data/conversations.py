"""Conversations: the messages of a row, in whichever of the usual forms it has them.

`messages` as OpenAI's fine-tuning files (`role`, `content`, `tool_calls`), `conversations` as
ShareGPT's (`from`, `value`), `prompt` and `completion` as lists of messages (TRL's), or a question
and an answer that templates make.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from data.prompt_template import ColumnError, NullError
from data.sources import Row
from files.formatting import format_value

Message = Mapping[str, Any]

CONVERSATION_COLUMNS = ("messages", "conversations", "conversation")
"""Columns of conversations, unless `data.messages` names another one."""

_ROLES = {
    "human": "user",
    "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "function_call": "assistant",
    "observation": "tool", "function": "tool", "function_response": "tool",
}  # fmt: skip
"""Other names of roles: ShareGPT's, and OpenAI's of before there were tools."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of an assistant's thoughts, of which transformers takes the first."""

OPTIONAL_FIELDS = ("name", "tool_call_id")
"""Fields of messages that some templates write."""

WEIGHT_FIELD = "weight"
"""Field of an assistant's message: 0 keeps it from being learned, as in OpenAI's files."""

_WEIGHT_FIELDS = {WEIGHT_FIELD: "OpenAI", "train": "Axolotl", "loss": "ms-swift"}
"""Fields that say so in the files of others."""

_KNOWN_FIELDS = {
    "role", "from", "content", "value", "tool_calls", "function_call",
    *REASONING_FIELDS, *OPTIONAL_FIELDS, *_WEIGHT_FIELDS,
}  # fmt: skip

VARIABLES_COLUMN = "chat_template_kwargs"
"""Column of what a row's template reads besides the messages, as TRL has it."""

_RESERVED_VARIABLES = {
    "messages",
    "conversations",
    "tools",
    "chat_template",
    "add_generation_prompt",
}
"""Variables that say something else than the row."""


@dataclass(frozen=True)
class Conversation:
    """What was said, in order, and the tools that could be called.

    Attributes:
        messages: each with `role`, and `content` or `tool_calls`, as chat templates read them.
        tools: their JSON schemas; None: there are none.
        answer_length: messages at the end that answer the others; None: the last one of the
            assistant does.
        variables: what the template reads besides, of this conversation alone.
        unread: fields of messages that nobody reads, with the first value of each.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    answer_length: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    unused_fields: Mapping[str, Any] = field(default_factory=dict)

    def with_system(self, system: str | None) -> Conversation:
        """With this system message, if it has none."""
        if system is None or (self.messages and self.messages[0]["role"] == "system"):
            return self
        return replace(self, messages=(make_message("system", system), *self.messages))

    def without_answer(self) -> Conversation:
        """Without the assistant's message at its end, if there is one: what is to be answered."""
        cut = len(self.messages)
        while cut and self.messages[cut - 1]["role"] == "assistant":
            cut -= 1
        return replace(self, messages=self.messages[:cut])


def make_message(role: str, content: str) -> Message:
    """A message of text."""
    return {"role": role, "content": content}


def is_message(row: Row) -> bool:
    """Whether a row is a message by itself."""
    return {"role", "content"} <= row.keys() or {"from", "value"} <= row.keys()


def has_conversation(row: Row, column: str | None = None) -> bool:
    """Whether a row holds messages; `column`: where, None: in a usual place."""
    if column is not None:
        return column in row
    return _conversation_column(row) is not None


def _conversation_column(row: Row) -> str | None:
    """The usual column that holds messages, or could: null stands for some if nothing else does."""
    for name in (*CONVERSATION_COLUMNS, "prompt"):
        if _is_message_list(row.get(name)):
            return name
    return next(
        (name for name in CONVERSATION_COLUMNS if name in row and row[name] in (None, "")), None
    )


def read_conversation(row: Row, column: str | None = None, empty: bool = False) -> Conversation:
    """The conversation in a row; it may have no messages.

    Args:
        empty: null stands for an empty text, and for no messages.

    Raises:
        NullError: it holds null where text is needed.
        ColumnError: there is none, or a message is not of a known form.
    """
    column = _conversation_column(row) if column is None else column
    if column is None or column not in row:
        there = ", ".join(map(str, row))
        raise ColumnError(
            f"there is no column {format_value(column or CONVERSATION_COLUMNS[0])}, but: {there}"
        )
    if row[column] is None and not empty:
        raise NullError(f"column {format_value(column)} holds null, but must hold messages")
    listed = _read_list(row, column) if row[column] or not empty else []
    if column == "prompt" and "completion" in row:
        answer = row["completion"]
        plain = isinstance(answer, str) and not _is_message_list(answer)
        listed = [
            *listed,
            *([make_message("assistant", answer)] if plain else _read_list(row, "completion")),
        ]
    messages = [_normalize_message(given, number, empty) for number, given in enumerate(listed, 1)]
    tools = (_read_list(row, "tools") or None) if row.get("tools") else None
    if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
        raise ColumnError("column 'tools' must hold objects, the JSON schemas of functions")
    return _with_row_settings(
        row, Conversation(messages, tools, unused_fields=unused_fields(listed))
    )


def unused_fields(messages: object) -> dict[str, Any]:
    """Fields of messages, as a row has them, that nobody reads, each with one of its values."""
    return {
        name: value
        for message in (messages if isinstance(messages, list) else ())
        for name, value in (message.items() if isinstance(message, Mapping) else ())
        if name not in _KNOWN_FIELDS and value not in (None, "", [], {})
    }


def conversation_columns(row: Row, column: str | None = None) -> set[str]:
    """The columns that `read_conversation` reads."""
    column = _conversation_column(row) if column is None else column
    both = {"completion"} if column == "prompt" else set[str]()
    return {column or "", "tools", "system", VARIABLES_COLUMN, *both}


QUESTION_COLUMNS = {"history", "system", VARIABLES_COLUMN}
"""Columns that `make_conversation` reads."""


def _with_row_settings(row: Row, talk: Conversation) -> Conversation:
    """A conversation with the system message and the template's variables of its row."""
    system, variables = row.get("system"), row.get(VARIABLES_COLUMN) or {}
    if isinstance(variables, str):
        variables = _parse_json(variables)
    if not isinstance(variables, Mapping):
        raise ColumnError(
            f"column {VARIABLES_COLUMN} holds {format_value(row[VARIABLES_COLUMN])}, but must "
            "hold an object"
        )
    taken = next((name for name in variables if name in _RESERVED_VARIABLES), None)
    if taken is not None:
        raise ColumnError(
            f"column {VARIABLES_COLUMN} must not say {format_value(taken)}: leave it out"
        )
    talk = replace(talk, variables=dict(variables))
    return talk.with_system(system if isinstance(system, str) and system else None)


def make_conversation(row: Row, question: str, answer: str | None) -> Conversation:
    """A conversation of one question; before it those of the column `history`, as LLaMA-Factory's
    Alpaca files have them."""
    earlier = _read_list(row, "history") if row.get("history") else []
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in earlier):
        raise ColumnError("column 'history' must hold pairs of a question and an answer")
    turns = [(role, text) for pair in earlier
             for role, text in zip(("user", "assistant"), pair, strict=True)]  # fmt: skip
    turns += [("user", question), *([] if answer is None else [("assistant", answer)])]
    return _with_row_settings(
        row, Conversation([_normalize_message({"role": r, "content": t}, 1) for r, t in turns])
    )


def _normalize_message(given: object, number: int, empty: bool = False) -> Message:
    """A message of any of the forms, as templates read it; `number`: for messages to people."""
    if not isinstance(given, Mapping):
        raise ColumnError(f"message {number} is {format_value(given)}, but must be an object")
    role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    if not isinstance(role, str):
        raise ColumnError(f"message {number} must have a role, or from, that is text")
    fields: dict[str, Any] = {"role": _ROLES.get(role, role)}
    calls = _tool_calls(given, content if role == "function_call" else None, number)
    if calls is not None and role == "function_call":
        content = None
    text = _message_text(content, number)
    if text is not None:
        fields["content"] = text
    elif calls is None and empty:
        fields["content"] = ""
    elif calls is None:
        raise NullError(f"message {number} has neither content nor tool calls")
    if calls is not None:
        fields["tool_calls"] = calls
    kept = (*REASONING_FIELDS, *OPTIONAL_FIELDS)
    fields |= {name: given[name] for name in kept if given.get(name) is not None}
    flags = [
        _loss_weight(given[name], name, number)
        for name in _WEIGHT_FIELDS
        if given.get(name) is not None
    ]
    return fields | ({WEIGHT_FIELD: min(flags)} if flags else {})


def _loss_weight(value: object, name: str, number: int) -> int:
    """Whether a message is learned, 0 or 1."""
    if not isinstance(value, int | float) or value not in (0, 1):
        raise ColumnError(
            f"message {number} has {name} {format_value(value)}, but it must be 0 or 1, or false "
            "or true"
        )
    return int(value)


def _message_text(content: object, number: int) -> str | None:
    """The text of a message: as it is, or in parts (OpenAI's `{"type": "text", "text": ...}`)."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ColumnError(f"message {number} holds {format_value(content)}, but must hold text")
    return "".join(map(str, texts))


def _tool_calls(given: Message, value: object, number: int) -> list[dict[str, Any]] | None:
    """The tool calls of a message; `value`: one as ShareGPT has it, in the text."""
    calls = given.get("tool_calls")
    if given.get("function_call"):
        calls = [given["function_call"]]
    elif isinstance(value, str):
        call = _parse_json(value)
        if call is None:
            return None  # a call in words of its own stays text
        calls = call if isinstance(call, list) else [call]
    if not calls:
        return None
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ColumnError(
            f"message {number} has tool_calls {format_value(calls)}, but must have objects"
        )
    return [_normalize_call(call, number) for call in calls]


def _normalize_call(given: Message, number: int) -> dict[str, Any]:
    """A tool call as templates read it: arguments are an object, not the JSON text of one."""
    function = given.get("function", given)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ColumnError(f"message {number} calls a tool without a name: {format_value(given)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        parsed = _parse_json(arguments)
        arguments = arguments if parsed is None else parsed  # templates can write text too
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**({"id": given["id"]} if given.get("id") else {}), **call}


def _parse_json(text: str) -> Any:
    """JSON text as data; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_message_list(value: object) -> bool:
    """Whether it is a list of messages, or the JSON text of one, as CSV has it."""
    if isinstance(value, str):
        return value.lstrip()[:1] == "[" and value.lstrip()[1:].lstrip()[:1] in ("{", "]")
    return isinstance(value, list) and (not value or isinstance(value[0], Mapping))


def _read_list(row: Row, column: str) -> list[Any]:
    value = row.get(column)
    if isinstance(value, str):
        value = _parse_json(value)
    if not isinstance(value, list):
        raise ColumnError(
            f"column {format_value(column)} holds {format_value(row.get(column))}, but must hold a "
            "list"
        )
    return value
