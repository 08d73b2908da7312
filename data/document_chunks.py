"""Documents: text that is learned whole, read in parts of bounded length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

LENGTH = 8192
"""Characters of a part, about: what a fraction of a file of text holds out, too."""

CONTEXT = 64
"""Characters before a part that are made tokens with it, so that it has the tokens that it has in
the whole document."""

_LINE_ENDS = re.compile(r"(?<=\S\n)(?=\S)")
_WORD_ENDS = re.compile(r"(?<=\S)(?=\s\S)")


class Part(NamedTuple):
    """A part of a document.

    Attributes:
        before: the end of the text that precedes it; "": nothing does.
        last: whether the document ends with it.
    """

    before: str
    last: bool


class DocumentPart(dict[str, Any]):
    """A row that is a part of a file of text: its column `text`, and where it stands."""

    def __init__(self, text: str, part: Part) -> None:
        super().__init__(text=text)
        self.part = part

    def __reduce__(self) -> tuple[Any, ...]:
        return DocumentPart, (self["text"], self.part)


def parts(pieces: Iterable[str]) -> Iterator[tuple[str, Part]]:
    """A document's parts: their texts, one after the other, are the document.

    A part ends with a line or, where there is none, before the space in front of a word: there
    tokenizers cut too.

    Args:
        pieces: the document, cut anywhere.
    """
    before, rest = "", ""
    for piece in chain(pieces, [""]):
        rest += piece
        while len(rest) > (2 * LENGTH if piece else LENGTH):
            end = _end(rest)
            yield rest[:end], Part(before, False)
            before, rest = rest[max(0, end - CONTEXT) : end], rest[end:]
    if rest:
        yield rest, Part(before, True)


def _end(text: str) -> int:
    """Where a part of a longer text ends."""
    for ends in (_LINE_ENDS, _WORD_ENDS):
        found = [end.start() for end in ends.finditer(text, LENGTH // 2, LENGTH + 1)]
        if found:
            return found[-1]
    return LENGTH
