"""Detection of conversation content that a chat template drops."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from data.conversations import REASONING_FIELDS, Message

THINK_TAGS = "<think>", "</think>"


class MessageText:
    """A text within a conversation message, with the name of its field.

    Attributes:
        name: for people.
        value: as the row has it.
        text: without white space, which templates change.
    """

    def __init__(self, name: str, value: str) -> None:
        self.name, self.value, self.text = name, value, _remove_white_space(value)

    @cached_property
    def json_escaped(self) -> str:
        """The text as a JSON string without white space."""
        return _remove_white_space(json.dumps(self.value, ensure_ascii=False)[1:-1])

    def count_occurrences(self, rendered: str) -> int:
        """Number of times that the text occurs in a rendered text, ignoring white space."""
        return max(rendered.count(self.text), rendered.count(self.json_escaped))


def find_dropped_content(messages: Sequence[Message], text: str) -> dict[str, str]:
    """Find message content missing from the rendered text; returns its first value by name.

    White space is not compared, nor whether a piece stands at the right place.
    """
    rendered, dropped = _remove_white_space(text), dict[str, str]()
    texts_by_message = [(message["role"], list(_texts_to_render(message))) for message in messages]
    counts = Counter(text_piece.text for _, texts in texts_by_message for text_piece in texts)
    missing = {
        text_piece.text
        for _, texts in texts_by_message
        for text_piece in texts
        if text_piece.count_occurrences(rendered) < counts[text_piece.text]
    }
    roles: dict[str, list[MessageText]] = {}
    for role, texts in texts_by_message:
        roles.setdefault(role, []).extend(texts)
    for role, texts in roles.items():
        lost_texts = [text_piece for text_piece in texts if text_piece.text in missing]
        if lost_texts and len(lost_texts) == len(texts):
            dropped[f"messages of the role {role}"] = lost_texts[0].value
        else:
            for text_piece in lost_texts:
                dropped.setdefault(text_piece.name, text_piece.value)
    return dropped


def _texts_to_render(message: Message) -> Iterator[MessageText]:
    """Texts within a message that a chat template is expected to render."""
    content, role = message.get("content") or "", message["role"]
    thoughts, closing_tag, answer = content.rpartition(THINK_TAGS[1])
    named_texts = [(f"all that messages of the role {role} say", content)]
    if role == "assistant" and closing_tag:
        named_texts = [
            ("thoughts", thoughts.rpartition(THINK_TAGS[0])[2]),
            (named_texts[0][0], answer),
        ]
    named_texts += [
        ("thoughts", next((message[name] for name in REASONING_FIELDS if message.get(name)), ""))
    ]
    for call in message.get("tool_calls") or ():
        function = [call["function"]["name"], call["function"]["arguments"]]
        named_texts += [("tool calls", text) for text in _iter_json_strings(function)]
    for name, value in named_texts:
        if isinstance(value, str) and value.strip():
            yield MessageText(name, value)


def _iter_json_strings(value: Any) -> Iterator[str]:
    """Collect all strings within a JSON value, at any depth."""
    if isinstance(value, str):
        yield value
    children = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list):
        for child in children:
            yield from _iter_json_strings(child)


def _remove_white_space(text: str) -> str:
    return "".join(text.split())
