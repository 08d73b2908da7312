"""Conversations: lists of messages, normalized from the common formats of data sets.

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
"""Default columns of conversations; `data.messages` names another one."""

_ROLES = {
    "human": "user",
    "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "function_call": "assistant",
    "observation": "tool", "function": "tool", "function_response": "tool",
}  # fmt: skip
"""Aliases of roles, from ShareGPT and from OpenAI's former function calls."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of the assistant's reasoning; transformers uses the first one."""

OPTIONAL_FIELDS = ("name", "tool_call_id")
"""Fields of messages that some templates render."""

WEIGHT_FIELD = "weight"
"""Field of an assistant message: 0 excludes it from the loss, as in OpenAI's files."""

_WEIGHT_FIELDS = {WEIGHT_FIELD: "OpenAI", "train": "Axolotl", "loss": "ms-swift"}
"""Aliases of the weight field, with the program that uses them."""

_KNOWN_FIELDS = {
    "role", "from", "content", "value", "tool_calls", "function_call",
    *REASONING_FIELDS, *OPTIONAL_FIELDS, *_WEIGHT_FIELDS,
}  # fmt: skip

VARIABLES_COLUMN = "chat_template_kwargs"
"""Column of a row's template variables, as in TRL."""

_RESERVED_VARIABLES = {
    "messages",
    "conversations",
    "tools",
    "chat_template",
    "add_generation_prompt",
}
"""Template variables that a row must not set."""


@dataclass(frozen=True)
class Conversation:
    """Messages of a conversation in order, and its tool definitions.

    Attributes:
        messages: dicts with `role`, and `content` or `tool_calls`, as chat templates read them.
        tools: JSON schemas; None without tools.
        answer_length: number of final messages that are the answer; None: the last assistant
            message.
        variables: template variables of this conversation alone.
        unused_fields: unknown fields of messages, each with its first value.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    answer_length: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    unused_fields: Mapping[str, Any] = field(default_factory=dict)

    def with_system_message(self, system: str | None) -> Conversation:
        """Add a system message unless the conversation has one."""
        if system is None or (self.messages and self.messages[0]["role"] == "system"):
            return self
        return replace(self, messages=(make_message("system", system), *self.messages))

    def without_last_answer(self) -> Conversation:
        """Remove the assistant's messages at the end of the conversation."""
        end = len(self.messages)
        while end and self.messages[end - 1]["role"] == "assistant":
            end -= 1
        return replace(self, messages=self.messages[:end])


def make_message(role: str, content: str) -> Message:
    """Create a conversation message with a role and text content."""
    return {"role": role, "content": content}


def is_message(row: Row) -> bool:
    """True if a data row is a single message of a conversation, not a conversation."""
    return {"role", "content"} <= row.keys() or {"from", "value"} <= row.keys()


def has_conversation(row: Row, column: str | None = None) -> bool:
    """True if a data row holds a conversation, in the given column or in a default one."""
    if column is not None:
        return column in row
    return _conversation_column(row) is not None


def _conversation_column(row: Row) -> str | None:
    """Column of a data row that holds messages; a null column only if no other exists."""
    for name in (*CONVERSATION_COLUMNS, "prompt"):
        if _is_message_list(row.get(name)):
            return name
    return next(
        (name for name in CONVERSATION_COLUMNS if name in row and row[name] in (None, "")), None
    )


def read_conversation(
    row: Row, column: str | None = None, null_as_empty: bool = False
) -> Conversation:
    """Read the conversation in a data row; it can have no messages.

    Args:
        null_as_empty: null stands for an empty text, and for no messages.

    Raises:
        NullError: it holds null where text is needed.
        ColumnError: there is none, or a message is not of a known form.
    """
    column = _conversation_column(row) if column is None else column
    if column is None or column not in row:
        columns = ", ".join(map(str, row))
        raise ColumnError(
            f"there is no column {format_value(column or CONVERSATION_COLUMNS[0])}, but: {columns}"
        )
    if row[column] is None and not null_as_empty:
        raise NullError(f"column {format_value(column)} holds null, but must hold messages")
    messages_in_row = _read_list_column(row, column) if row[column] or not null_as_empty else []
    if column == "prompt" and "completion" in row:
        answer = row["completion"]
        is_text = isinstance(answer, str) and not _is_message_list(answer)
        messages_in_row = [
            *messages_in_row,
            *(
                [make_message("assistant", answer)]
                if is_text
                else _read_list_column(row, "completion")
            ),
        ]
    messages = [
        _normalize_message(message, number, null_as_empty)
        for number, message in enumerate(messages_in_row, 1)
    ]
    tools = (_read_list_column(row, "tools") or None) if row.get("tools") else None
    if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
        raise ColumnError("column 'tools' must hold objects, the JSON schemas of functions")
    return _add_row_settings(
        row, Conversation(messages, tools, unused_fields=find_unused_fields(messages_in_row))
    )


def find_unused_fields(messages: object) -> dict[str, Any]:
    """Message fields in a data row that are not read, each with one of its values."""
    return {
        name: value
        for message in (messages if isinstance(messages, list) else ())
        for name, value in (message.items() if isinstance(message, Mapping) else ())
        if name not in _KNOWN_FIELDS and value not in (None, "", [], {})
    }


def conversation_columns(row: Row, column: str | None = None) -> set[str]:
    """Columns of a data row that `read_conversation` reads."""
    column = _conversation_column(row) if column is None else column
    completion_column = {"completion"} if column == "prompt" else set[str]()
    return {column or "", "tools", "system", VARIABLES_COLUMN, *completion_column}


QUESTION_COLUMNS = {"history", "system", VARIABLES_COLUMN}
"""Columns that `make_conversation` uses."""


def _add_row_settings(row: Row, conversation: Conversation) -> Conversation:
    """Add the system message and chat template variables of a data row to its conversation."""
    system, variables = row.get("system"), row.get(VARIABLES_COLUMN) or {}
    if isinstance(variables, str):
        variables = _parse_json(variables)
    if not isinstance(variables, Mapping):
        raise ColumnError(
            f"column {VARIABLES_COLUMN} holds {format_value(row[VARIABLES_COLUMN])}, but must "
            "hold an object"
        )
    reserved_name = next((name for name in variables if name in _RESERVED_VARIABLES), None)
    if reserved_name is not None:
        raise ColumnError(
            f"column {VARIABLES_COLUMN} must not say {format_value(reserved_name)}: leave it out"
        )
    conversation = replace(conversation, variables=dict(variables))
    return conversation.with_system_message(system if isinstance(system, str) and system else None)


def make_conversation(row: Row, question: str, answer: str | None) -> Conversation:
    """Create a conversation of one question and answer.

    The turns of the column `history` (LLaMA-Factory) come first.
    """
    history = _read_list_column(row, "history") if row.get("history") else []
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in history):
        raise ColumnError("column 'history' must hold pairs of a question and an answer")
    turns = [(role, text) for pair in history
             for role, text in zip(("user", "assistant"), pair, strict=True)]  # fmt: skip
    turns += [("user", question), *([] if answer is None else [("assistant", answer)])]
    return _add_row_settings(
        row, Conversation([_normalize_message({"role": r, "content": t}, 1) for r, t in turns])
    )


def _normalize_message(
    message: object, message_number: int, null_as_empty: bool = False
) -> Message:
    """Convert a message of any supported format to role, content and tool calls."""
    if not isinstance(message, Mapping):
        raise ColumnError(
            f"message {message_number} is {format_value(message)}, but must be an object"
        )
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str):
        raise ColumnError(f"message {message_number} must have a role, or from, that is text")
    fields: dict[str, Any] = {"role": _ROLES.get(role, role)}
    calls = _normalize_tool_calls(
        message, content if role == "function_call" else None, message_number
    )
    if calls is not None and role == "function_call":
        content = None
    text = _content_to_text(content, message_number)
    if text is not None:
        fields["content"] = text
    elif calls is None and null_as_empty:
        fields["content"] = ""
    elif calls is None:
        raise NullError(f"message {message_number} has neither content nor tool calls")
    if calls is not None:
        fields["tool_calls"] = calls
    copied_fields = (*REASONING_FIELDS, *OPTIONAL_FIELDS)
    fields |= {name: message[name] for name in copied_fields if message.get(name) is not None}
    flags = [
        _parse_loss_weight(message[name], name, message_number)
        for name in _WEIGHT_FIELDS
        if message.get(name) is not None
    ]
    return fields | ({WEIGHT_FIELD: min(flags)} if flags else {})


def _parse_loss_weight(value: object, name: str, message_number: int) -> int:
    """Parse a message's loss weight: 0 or 1."""
    if not isinstance(value, int | float) or value not in (0, 1):
        raise ColumnError(
            f"message {message_number} has {name} {format_value(value)}, but it must be 0 or 1, or "
            "false or true"
        )
    return int(value)


def _content_to_text(content: object, message_number: int) -> str | None:
    """Text of a message's content: a string, or a list of parts as in OpenAI's API."""
    if content is None or isinstance(content, str):
        return content
    content_parts = content if isinstance(content, list) else [content]
    texts = [
        content_part.get("text") if isinstance(content_part, Mapping) else content_part
        for content_part in content_parts
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ColumnError(
            f"message {message_number} holds {format_value(content)}, but must hold text"
        )
    return "".join(map(str, texts))


def _normalize_tool_calls(
    message: Message, value: object, message_number: int
) -> list[dict[str, Any]] | None:
    """Tool calls of a message, converted to OpenAI's format.

    `value` is ShareGPT's call in the message text.
    """
    calls = message.get("tool_calls")
    if message.get("function_call"):
        calls = [message["function_call"]]
    elif isinstance(value, str):
        call = _parse_json(value)
        if call is None:
            return None  # a call in words of its own stays text
        calls = call if isinstance(call, list) else [call]
    if not calls:
        return None
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ColumnError(
            f"message {message_number} has tool_calls {format_value(calls)}, but must have objects"
        )
    return [_normalize_tool_call(call, message_number) for call in calls]


def _normalize_tool_call(tool_call: Message, message_number: int) -> dict[str, Any]:
    """Convert a tool call to OpenAI's format, with arguments as an object."""
    function = tool_call.get("function", tool_call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ColumnError(
            f"message {message_number} calls a tool without a name: {format_value(tool_call)}"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        parsed = _parse_json(arguments)
        arguments = arguments if parsed is None else parsed  # templates can write text too
    call_id = {"id": tool_call["id"]} if tool_call.get("id") else {}
    named_function = {"name": function["name"], "arguments": arguments}
    return {**call_id, "type": "function", "function": named_function}


def _parse_json(text: str) -> Any:
    """Parse JSON; returns None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_message_list(value: object) -> bool:
    """True for a list of messages, or for its JSON text as in CSV files."""
    if isinstance(value, str):
        return value.lstrip()[:1] == "[" and value.lstrip()[1:].lstrip()[:1] in ("{", "]")
    return isinstance(value, list) and (not value or isinstance(value[0], Mapping))


def _read_list_column(row: Row, column: str) -> list[Any]:
    value = row.get(column)
    if isinstance(value, str):
        value = _parse_json(value)
    if not isinstance(value, list):
        raise ColumnError(
            f"column {format_value(column)} holds {format_value(row.get(column))}, but must hold a "
            "list"
        )
    return value
