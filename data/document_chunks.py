"""Documents split into chunks of bounded length for tokenization."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

CHUNK_CHARACTERS = 8192
"""Approximate characters of a chunk; also the unit of a held-out fraction of a text file."""

CONTEXT_CHARACTERS = 64
"""Characters before a chunk that are tokenized with it, so that its tokens are those in the whole
document."""

_LINE_END = re.compile(r"(?<=\S\n)(?=\S)")
_WORD_END = re.compile(r"(?<=\S)(?=\s\S)")


class DocumentChunk(NamedTuple):
    """Position of a text chunk within the document that was split.

    Attributes:
        context: the preceding characters of the document; "" at its start.
        is_last: True for the document's last chunk.
    """

    context: str
    is_last: bool


class DocumentChunkRow(dict[str, Any]):
    """A data row whose column `text` is a chunk of a text file."""

    def __init__(self, text: str, doc_chunk: DocumentChunk) -> None:
        super().__init__(text=text)
        self.doc_chunk = doc_chunk

    def __reduce__(self) -> tuple[Any, ...]:
        return DocumentChunkRow, (self["text"], self.doc_chunk)


def split_into_chunks(text_pieces: Iterable[str]) -> Iterator[tuple[str, DocumentChunk]]:
    """Split a document's text into chunks; concatenated, they are the document.

    A part ends with a line or, where there is none, before the space in front of a word: there
    tokenizers cut too.

    Args:
        text_pieces: the document, cut anywhere.
    """
    context, buffer = "", ""
    for piece in chain(text_pieces, [""]):
        buffer += piece
        while len(buffer) > (2 * CHUNK_CHARACTERS if piece else CHUNK_CHARACTERS):
            end = _find_chunk_end(buffer)
            yield buffer[:end], DocumentChunk(context, False)
            context, buffer = buffer[max(0, end - CONTEXT_CHARACTERS) : end], buffer[end:]
    if buffer:
        yield buffer, DocumentChunk(context, True)


def _find_chunk_end(text: str) -> int:
    """End offset of the first chunk of a document's text."""
    for ends in (_LINE_END, _WORD_END):
        positions = [
            end.start() for end in ends.finditer(text, CHUNK_CHARACTERS // 2, CHUNK_CHARACTERS + 1)
        ]
        if positions:
            return positions[-1]
    return CHUNK_CHARACTERS
