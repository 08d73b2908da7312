"""Texts that end an answer, found token by token.

The automaton of Aho and Corasick (Communications of the ACM 18, 1975) reads the bytes that tokens
print, and remembers how much of each text it has just read. A text may begin and end inside a
token, so a table has the automaton's state after each whole token. Most tokens act alike and share
a column.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import popxl
from popxl import Tensor, ops

BYTES = 256


@dataclass(frozen=True, eq=False)
class StopStringAutomaton:
    """The automaton's transitions by token, as data.

    Attributes:
        columns: int32 (tokens + 1,), the column of each token; the last one is that of no token.
        table: int32 (states, columns), the state after a token, plus `states` if one of the texts
            has ended in it.
    """

    columns: np.ndarray
    table: np.ndarray

    @staticmethod
    def from_texts(texts: Sequence[str], tokens: Sequence[bytes]) -> StopStringAutomaton:
        """
        Args:
            texts: none of them empty.
            tokens: what each token prints.
        """
        wanted = [text.encode() for text in texts]
        after, ends = _automaton(wanted)
        short = _shortened([*tokens, b""], set(b"".join(wanted)))
        pieces = {piece: i for i, piece in enumerate(dict.fromkeys(short))}
        rows = np.stack([_read(after, ends, piece) for piece in pieces])
        table, shared = np.unique(rows, axis=0, return_inverse=True)
        columns = shared.reshape(-1)[[pieces[piece] for piece in short]]
        return StopStringAutomaton(columns.astype(np.int32), table.T.astype(np.int32))

    def start(self, read: Tensor) -> Tensor:
        """States after what was read: int32 (rows,).

        Args:
            read: int32 (rows, n), -1 for no token. A text that ends in it ends no answer.
        """
        rows, n = read.shape

        def one(at: Tensor, state: Tensor, read: Tensor) -> list[Tensor]:
            token = ops.dynamic_slice(read, at, [1], [1], no_overlap=True).reshape((rows,))
            return [at + 1, self.step(state, token)[0]]

        first = popxl.constant(0, popxl.int32, "first_token")
        state = popxl.constant(np.zeros(rows), popxl.int32, "nothing_read")
        loop = popxl.gir().create_graph(one, first, state, read)
        return ops.repeat(loop, n, first, state, read)[1]

    def step(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """States after a token of each, and whether one of the texts has ended in it.

        Args:
            states, tokens: int32, of the same shape.
        """
        count, width = self.table.shape
        nothing = popxl.constant(len(self.columns) - 1, popxl.int32, "no_token")
        zero = popxl.constant(0, popxl.int32)
        columns = popxl.constant(self.columns, popxl.int32, "columns_of_tokens")
        table = popxl.constant(self.table.reshape(-1), popxl.int32, "states_after_tokens")
        column = ops.gather(columns, ops.where(ops.greater(zero, tokens), nothing, tokens))
        entry = ops.gather(table, states * width + column)
        ended = ops.greater(entry, popxl.constant(count - 1, popxl.int32))
        return ops.where(ended, entry - count, entry), ended


def _shortened(pieces: Sequence[bytes], alphabet: set[int]) -> list[bytes]:
    """The pieces, with each run of bytes that no text contains replaced by one such byte, so that
    few different pieces are left."""
    other = next((byte for byte in range(BYTES) if byte not in alphabet), None)
    if other is None:
        return list(pieces)
    table = bytes(byte if byte in alphabet else other for byte in range(BYTES))
    many, one = re.compile(re.escape(bytes([other])) + b"+"), re.escape(bytes([other]))
    return [many.sub(one, piece.translate(table)) for piece in pieces]


def _automaton(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """States after each byte, int (states, 256), and whether a text ends in a state."""
    prefixes = {b"": 0}
    for text in texts:
        for n in range(1, len(text) + 1):
            prefixes.setdefault(text[:n], len(prefixes))
    after = np.zeros((len(prefixes), BYTES), np.int64)
    ends = np.zeros(len(prefixes), bool)
    for prefix, state in prefixes.items():
        ends[state] = any(prefix.endswith(text) for text in texts)
        for byte in range(BYTES):
            read = prefix + bytes([byte])
            longest = next(read[i:] for i in range(len(read) + 1) if read[i:] in prefixes)
            after[state, byte] = prefixes[longest]
    return after, ends


def _read(after: np.ndarray, ends: np.ndarray, piece: bytes) -> np.ndarray:
    """The row of `Stops.table` for what a token prints: of each state."""
    states, ended = np.arange(len(after)), np.zeros(len(after), bool)
    for byte in piece:
        states = after[states, byte]
        ended |= ends[states]
    return states + len(after) * ended
