"""Stop strings: texts that end an answer, matched token by token.

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
    """A finite automaton over token ids that finds stop strings as tokens arrive.

    Attributes:
        columns: int32 (tokens + 1,), the column of each token; the last entry is for no token.
        table: int32 (states, columns), the state after a token, plus `states` if one of the texts
            has ended in it.
    """

    columns: np.ndarray
    table: np.ndarray

    @staticmethod
    def from_stop_strings(
        stop_strings: Sequence[str], tokens: Sequence[bytes]
    ) -> StopStringAutomaton:
        """Build the automaton that matches any of `stop_strings`.

        Args:
            stop_strings: stop strings that are not empty.
            tokens: the bytes that each token prints.
        """
        encoded = [text.encode() for text in stop_strings]
        transitions, is_final = _build_automaton(encoded)
        short = _collapse_other_bytes([*tokens, b""], set(b"".join(encoded)))
        token_bytes = {token: i for i, token in enumerate(dict.fromkeys(short))}
        rows = np.stack([_token_transitions(transitions, is_final, token) for token in token_bytes])
        table, column_of_piece = np.unique(rows, axis=0, return_inverse=True)
        columns = column_of_piece.reshape(-1)[[token_bytes[token] for token in short]]
        return StopStringAutomaton(columns.astype(np.int32), table.T.astype(np.int32))

    def init_states(self, prompt_tokens: Tensor) -> Tensor:
        """Automaton states after the prompts: int32 tokens (rows, n) -> int32 states (rows,).

        Args:
            prompt_tokens: -1 stands for no token. A stop string in them ends no answer.
        """
        rows, n = prompt_tokens.shape

        def read_token(index: Tensor, state: Tensor, tokens: Tensor) -> list[Tensor]:
            token = ops.dynamic_slice(tokens, index, [1], [1], no_overlap=True).reshape((rows,))
            return [index + 1, self.advance_states(state, token)[0]]

        first = popxl.constant(0, popxl.int32, "first_token")
        state = popxl.constant(np.zeros(rows), popxl.int32, "initial_states")
        loop = popxl.gir().create_graph(read_token, first, state, prompt_tokens)
        return ops.repeat(loop, n, first, state, prompt_tokens)[1]

    def advance_states(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the states by one token: int32, int32 -> int32 states, bool mask; equal shapes.

        The mask is true where a stop string has ended in the token.
        """
        count, width = self.table.shape
        no_token = popxl.constant(len(self.columns) - 1, popxl.int32, "no_token")
        zero = popxl.constant(0, popxl.int32)
        columns = popxl.constant(self.columns, popxl.int32, "token_columns")
        table = popxl.constant(self.table.reshape(-1), popxl.int32, "transitions")
        column = ops.gather(columns, ops.where(ops.greater(zero, tokens), no_token, tokens))
        entry = ops.gather(table, states * width + column)
        ended = ops.greater(entry, popxl.constant(count - 1, popxl.int32))
        return ops.where(ended, entry - count, entry), ended


def _collapse_other_bytes(token_bytes: Sequence[bytes], alphabet: set[int]) -> list[bytes]:
    """Replace each run of bytes that occur in no stop string by a single such byte.

    So most tokens become equal and share a column of the table.
    """
    other = next((byte for byte in range(BYTES) if byte not in alphabet), None)
    if other is None:
        return list(token_bytes)
    table = bytes(byte if byte in alphabet else other for byte in range(BYTES))
    run_of_others = re.compile(re.escape(bytes([other])) + b"+")
    single_other = re.escape(bytes([other]))
    return [run_of_others.sub(single_other, token.translate(table)) for token in token_bytes]


def _build_automaton(stop_strings: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Build a byte-level automaton: next states, int (states, 256); final, bool (states,)."""
    prefixes = {b"": 0}
    for text in stop_strings:
        for n in range(1, len(text) + 1):
            prefixes.setdefault(text[:n], len(prefixes))
    transitions = np.zeros((len(prefixes), BYTES), np.int64)
    is_final = np.zeros(len(prefixes), bool)
    for prefix, state in prefixes.items():
        is_final[state] = any(prefix.endswith(text) for text in stop_strings)
        for byte in range(BYTES):
            read = prefix + bytes([byte])
            longest = next(read[i:] for i in range(len(read) + 1) if read[i:] in prefixes)
            transitions[state, byte] = prefixes[longest]
    return transitions, is_final


def _token_transitions(transitions: np.ndarray, is_final: np.ndarray, token: bytes) -> np.ndarray:
    """Next automaton state from every state after all bytes of a token: int64 (states,)."""
    states, ended = np.arange(len(transitions)), np.zeros(len(transitions), bool)
    for byte in token:
        states = transitions[states, byte]
        ended |= is_final[states]
    return states + len(transitions) * ended
