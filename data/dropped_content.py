"""Content of a conversation that is missing from its rendered text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from data.conversations import REASONING_FIELDS, Message

THINK_TAGS = "<think>", "</think>"


class MessageText:
    """A piece of text in a message.

    Attributes:
        name: for people.
        value: as the row has it.
        text: without white space, which templates change.
    """

    def __init__(self, name: str, value: str) -> None:
        self.name, self.value, self.text = name, value, _remove_spaces(value)

    @cached_property
    def escaped(self) -> str:
        """The text as a JSON string, without white space."""
        return _remove_spaces(json.dumps(self.value, ensure_ascii=False)[1:-1])

    def count_in(self, written: str) -> int:
        """Number of occurrences in a text without white space."""
        return max(written.count(self.text), written.count(self.escaped))


def find_dropped_content(messages: Sequence[Message], text: str) -> dict[str, str]:
    """Find content that the rendered text lacks; returns the first value by name.

    White space is not compared, nor whether a piece stands at the right place.
    """
    written, found = _remove_spaces(text), dict[str, str]()
    said = [(message["role"], list(_message_texts(message))) for message in messages]
    counts = Counter(piece.text for _, pieces in said for piece in pieces)
    missing = {
        piece.text
        for _, pieces in said
        for piece in pieces
        if piece.count_in(written) < counts[piece.text]
    }
    roles: dict[str, list[MessageText]] = {}
    for role, pieces in said:
        roles.setdefault(role, []).extend(pieces)
    for role, pieces in roles.items():
        lost = [piece for piece in pieces if piece.text in missing]
        if lost and len(lost) == len(pieces):
            found[f"messages of the role {role}"] = lost[0].value
        else:
            for piece in lost:
                found.setdefault(piece.name, piece.value)
    return found


def _message_texts(message: Message) -> Iterator[MessageText]:
    """Texts of a message that a template should render."""
    content, role = message.get("content") or "", message["role"]
    thoughts, end, answer = content.rpartition(THINK_TAGS[1])
    found = [(f"all that messages of the role {role} say", content)]
    if role == "assistant" and end:
        found = [("thoughts", thoughts.rpartition(THINK_TAGS[0])[2]), (found[0][0], answer)]
    found += [
        ("thoughts", next((message[name] for name in REASONING_FIELDS if message.get(name)), ""))
    ]
    for call in message.get("tool_calls") or ():
        function = [call["function"]["name"], call["function"]["arguments"]]
        found += [("tool calls", text) for text in _strings_in(function)]
    for name, value in found:
        if isinstance(value, str) and value.strip():
            yield MessageText(name, value)


def _strings_in(value: Any) -> Iterator[str]:
    """All strings in a JSON value."""
    if isinstance(value, str):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list):
        for one in inner:
            yield from _strings_in(one)


def _remove_spaces(text: str) -> str:
    return "".join(text.split())
