"""Comparison of a conversation with the text that a chat template made of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from data.conversations import REASONING, Message

THOUGHTS = "<think>", "</think>"


class Piece:
    """A text of a message.

    Attributes:
        name: for people.
        value: as the row has it.
        text: without white space, which templates change.
    """

    def __init__(self, name: str, value: str) -> None:
        self.name, self.value, self.text = name, value, _squeezed(value)

    @cached_property
    def escaped(self) -> str:
        """The text as JSON writes it."""
        return _squeezed(json.dumps(self.value, ensure_ascii=False)[1:-1])

    def count_in(self, written: str) -> int:
        """Number of times that it stands in a text without white space."""
        return max(written.count(self.text), written.count(self.escaped))


def unwritten(messages: Sequence[Message], text: str) -> dict[str, str]:
    """Names of what messages say that their text does not, with the first value of each name.

    White space is not compared, nor whether a piece stands at the right place.
    """
    written, found = _squeezed(text), dict[str, str]()
    said = [(message["role"], list(_pieces(message))) for message in messages]
    counts = Counter(piece.text for _, pieces in said for piece in pieces)
    missing = {
        piece.text
        for _, pieces in said
        for piece in pieces
        if piece.count_in(written) < counts[piece.text]
    }
    roles: dict[str, list[Piece]] = {}
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


def _pieces(message: Message) -> Iterator[Piece]:
    """The texts of a message that its template should write."""
    content, role = message.get("content") or "", message["role"]
    thoughts, end, answer = content.rpartition(THOUGHTS[1])
    found = [(f"all that messages of the role {role} say", content)]
    if role == "assistant" and end:
        found = [("thoughts", thoughts.rpartition(THOUGHTS[0])[2]), (found[0][0], answer)]
    found += [("thoughts", next((message[name] for name in REASONING if message.get(name)), ""))]
    for call in message.get("tool_calls") or ():
        function = [call["function"]["name"], call["function"]["arguments"]]
        found += [("tool calls", text) for text in _texts(function)]
    for name, value in found:
        if isinstance(value, str) and value.strip():
            yield Piece(name, value)


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list):
        for one in inner:
            yield from _texts(one)


def _squeezed(text: str) -> str:
    return "".join(text.split())
