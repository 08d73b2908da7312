"""Documents: text that is learned whole, read in parts of bounded length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

CHUNK_CHARACTERS = 8192
"""Characters of a part, about: what a fraction of a file of text holds out, too."""

CONTEXT_CHARACTERS = 64
"""Characters before a part that are made tokens with it, so that it has the tokens that it has in
the whole document."""

_LINE_END = re.compile(r"(?<=\S\n)(?=\S)")
_WORD_END = re.compile(r"(?<=\S)(?=\s\S)")


class DocumentChunk(NamedTuple):
    """A part of a document.

    Attributes:
        before: the end of the text that precedes it; "": nothing does.
        last: whether the document ends with it.
    """

    context: str
    is_last: bool


class DocumentChunkRow(dict[str, Any]):
    """A row that is a part of a file of text: its column `text`, and where it stands."""

    def __init__(self, text: str, doc_chunk: DocumentChunk) -> None:
        super().__init__(text=text)
        self.doc_chunk = doc_chunk

    def __reduce__(self) -> tuple[Any, ...]:
        return DocumentChunkRow, (self["text"], self.doc_chunk)


def split_document(pieces: Iterable[str]) -> Iterator[tuple[str, DocumentChunk]]:
    """A document's parts: their texts, one after the other, are the document.

    A part ends with a line or, where there is none, before the space in front of a word: there
    tokenizers cut too.

    Args:
        pieces: the document, cut anywhere.
    """
    before, rest = "", ""
    for piece in chain(pieces, [""]):
        rest += piece
        while len(rest) > (2 * CHUNK_CHARACTERS if piece else CHUNK_CHARACTERS):
            end = _chunk_end(rest)
            yield rest[:end], DocumentChunk(before, False)
            before, rest = rest[max(0, end - CONTEXT_CHARACTERS) : end], rest[end:]
    if rest:
        yield rest, DocumentChunk(before, True)


def _chunk_end(text: str) -> int:
    """Where a part of a longer text ends."""
    for ends in (_LINE_END, _WORD_END):
        found = [
            end.start() for end in ends.finditer(text, CHUNK_CHARACTERS // 2, CHUNK_CHARACTERS + 1)
        ]
        if found:
            return found[-1]
    return CHUNK_CHARACTERS
