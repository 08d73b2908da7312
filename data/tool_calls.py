"""Message formats of tool calls, as chat templates differ in the format that they render."""

from __future__ import annotations

import json
from itertools import product
from typing import Any, NamedTuple

from data.conversations import Message

ABSENT = object()
"""Marks a message without a content field."""

PROBE_FUNCTION = "a_call_that_is_written"
"""Function name that shows if a template renders a call."""


class ToolCallFormat(NamedTuple):
    """Message format of tool calls without text.

    Attributes:
        content: None, an empty text, or `ABSENT`, which leaves the content out.
        arguments_as_text: arguments are JSON text, not an object.
    """

    content: Any
    arguments_as_text: bool

    def apply_to_message(self, message: Message) -> Message:
        """Convert a message with tool calls to this format."""
        if not message.get("tool_calls"):
            return message
        calls = [self._format_tool_call(call) for call in message["tool_calls"]]
        content = {} if self.content is ABSENT or message.get("content") else {
            "content": self.content
        }  # fmt: skip
        return {**message, "tool_calls": calls, **content}

    def _format_tool_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function, arguments = call["function"], call["function"]["arguments"]
        if not self.arguments_as_text or isinstance(arguments, str):
            return call
        arguments_text = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments_text}}


TOOL_CALL_FORMATS = [ToolCallFormat(*form) for form in product((ABSENT, None, ""), (False, True))]
"""Formats in order of trial; most templates render the first one."""

PROBE_MESSAGE: Message = {
    "role": "assistant",
    "tool_calls": [
        {"type": "function", "function": {"name": PROBE_FUNCTION, "arguments": {"a": "b"}}}
    ],
}


def tool_calls_to_text(message: Message) -> Message:
    """Convert tool calls to text in the format of Hermes and Qwen."""
    if "tool_calls" not in message:
        return message
    lines = [message["content"]] if message.get("content") else []
    for call in message["tool_calls"]:
        lines.append(
            f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        )
    other_fields = {name: value for name, value in message.items() if name != "tool_calls"}
    return other_fields | {"content": "\n".join(lines)}
