"""Several token sequences in a row: fewer positions of a batch are padding.

Each sequence keeps to itself by a number, its segment, which attention compares; so a row computes
what its sequences would, each alone (Raffel et al., arXiv:1910.10683, section 3.1.2, pack theirs
the same way).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from data.encoding import IGNORE_INDEX, EncodedExamples, shift_right
from data.lengths import Cuts

EMPTY = -1
"""In place of a sequence's index: nothing is there."""


def pack_rows(lengths: Sequence[int] | np.ndarray, capacity: int, most: int) -> np.ndarray:
    """Share sequences out to rows.

    Best fit, longest first: a sequence goes to the row that it fills best, or opens one. `most` 1
    keeps the order.

    Args:
        lengths: tokens of each sequence, from 1 to `capacity`.
        capacity: tokens of a row.
        most: sequences of a row, at most.

    Returns:
        int64 [rows, most]: the indices of each row's sequences, then `EMPTY`.
    """
    if most == 1:
        return np.arange(len(lengths)).reshape(-1, 1)
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the tokens they have left
    rooms = 0  # bit r: open_rows[r] is not empty
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[index])
        fitting = rooms >> length
        if fitting:
            room = length + _lowest_bit(fitting)
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if len(rows[row]) < most and room > length:
            open_rows[room - length].append(row)
            rooms |= 1 << (room - length)
    out = np.full((len(rows), most), EMPTY, np.int64)
    for slots, indices in zip(out, rows, strict=True):
        slots[: len(indices)] = indices
    return out


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def fill_rows(
    rows: np.ndarray, tokens_of: Callable[[int], np.ndarray], capacity: int, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lay the sequences of each row one after the other.

    Args:
        rows: what `pack_rows` returns, or some of it.
        tokens_of: the tokens of the sequence at an index.

    Returns:
        The tokens, and the number of each one's place in the row, from 1 (0: padding), int32
        [rows, capacity] both.
    """
    words = np.full((len(rows), capacity), pad, np.int32)
    segments = np.zeros_like(words)
    for row, indices in enumerate(rows):
        start = 0
        for place, index in enumerate(indices[indices != EMPTY], 1):
            tokens = tokens_of(index)
            end = start + len(tokens)
            words[row, start:end], segments[row, start:end] = tokens, place
            start = end
    return words, segments


@dataclass(frozen=True)
class PackedExamples:
    """Examples for an encoder-decoder model, several in a row; a row is a sample.

    Attributes:
        examples: each by itself.
        rows: int64 [n, places], see `pack_rows`.
    """

    examples: EncodedExamples
    rows: np.ndarray

    @classmethod
    def of(cls, examples: EncodedExamples, most: int) -> PackedExamples:
        """Pack all examples into rows of their `sequence_length`, `most` in each."""
        lengths = np.diff(examples.starts)
        return cls(examples, pack_rows(lengths, examples.sequence_length, most))

    @property
    def cuts(self) -> Cuts:
        """What was cut or dropped."""
        return self.examples.cuts

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The batch of the rows at `indices`, in their order, int32.

        `input_ids` and `attention_mask` are [n, sequence_length], the mask with the places' numbers
        as in `fill_rows`; `decoder_input_ids` and `labels` have a row of their own for each place,
        [n * places, decoder_sequence_length].
        """
        found, rows = self.examples, self.rows[np.asarray(indices, np.int64)]
        words, segments = fill_rows(rows, found.prompt, found.sequence_length, found.pad)
        taken = rows.reshape(-1)
        labels = np.where(taken[:, None] == EMPTY, IGNORE_INDEX, found.targets[taken])
        return {
            "input_ids": words,
            "attention_mask": segments,
            "decoder_input_ids": shift_right(labels, found.pad),
            "labels": labels.astype(np.int32),
        }
