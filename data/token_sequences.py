"""Samples of whole token sequences, of which objectives read one vector each.

Batches are dicts of int32 arrays [n, sequence_length]:
    input_ids, segment_ids     a segment is the number of a sequence in the sample, from 1
    pooled_ids                 see `data.pooling`
In an encoder-decoder the decoder reads each sequence too, shifted right by one, in a row of its
own: decoder_input_ids and pooled_ids are [n * places, sequence_length].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from data.packing import EMPTY_SLOT, concatenate_packed_sequences, pack_sequences
from data.pooling import POOLED_IDS, Pooling, find_pooled_ids
from data.samples import ExtendedSamples, hash_arrays
from data.truncation import NO_TRUNCATION, TruncationCounts, left_truncated_indices, truncate_right

DecoderInputs = Callable[[np.ndarray], np.ndarray]
"""Returns what a decoder reads for the labels [n, length], `IGNORE_INDEX` after their end."""


@dataclass(frozen=True)
class TokenSequences:
    """Whole token sequences, one or several in a sample.

    Attributes:
        sequences: int32 ids of each, at most `sequence_length`.
        slots: int64 [n, places], the index of the sequence in each place, or `EMPTY_SLOT`.
        sequence_length: tokens of a sample.
        eos, pad: ids of the end token and of the padding token.
        pooling: tokens whose vectors stand for a sequence.
        truncation: counts of truncated sequences.
    """

    sequences: Sequence[np.ndarray]
    slots: np.ndarray
    sequence_length: int
    eos: int
    pad: int
    pooling: Pooling
    truncation_counts: TruncationCounts = NO_TRUNCATION

    @property
    def digest(self) -> str:
        ids = np.concatenate([np.zeros(0, np.int32), *self.sequences])
        lengths = np.asarray([len(s) for s in self.sequences], np.int64)
        return hash_arrays(ids, lengths, self.slots, self.sequence_length)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sample, int64 [n]."""
        lengths = np.asarray([*map(len, self.sequences), 0], np.int64)
        total: np.ndarray = lengths[self.slots].sum(axis=1)
        return total

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Batch of the samples at `indices`, in their order: arrays by name."""
        input_ids, segment_ids = concatenate_packed_sequences(
            self.slots[np.asarray(indices, np.int64)],
            self.sequences.__getitem__,
            self.sequence_length,
            self.pad,
        )
        pooled_ids = find_pooled_ids(segment_ids, self.pooling, input_ids, self.eos, self.pad)
        return {"input_ids": input_ids, "segment_ids": segment_ids, POOLED_IDS: pooled_ids}


@dataclass(frozen=True)
class DecodedSequences(ExtendedSamples):
    """Token sequences that an encoder and, shifted right by one, a decoder read.

    Attributes:
        samples: the sequences as the encoder reads them.
        shift_right: see `DecoderInputs`.
    """

    samples: TokenSequences
    shift_right: DecoderInputs

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Batch of the samples at `indices`, in their order: arrays by name."""
        encoded = self.samples
        slots = encoded.slots[np.asarray(indices, np.int64)].reshape(-1, 1)
        ids, segment_ids = concatenate_packed_sequences(
            slots, encoded.sequences.__getitem__, encoded.sequence_length, encoded.pad
        )
        pooled_ids = find_pooled_ids(segment_ids, encoded.pooling, ids, encoded.eos, encoded.pad)
        return {
            **encoded.take(indices),
            "decoder_input_ids": self.shift_right(ids),
            POOLED_IDS: pooled_ids,
        }


def pack_rows(
    sequences: Sequence[np.ndarray], per_row: int, capacity: int, rows_per_sample: int
) -> tuple[np.ndarray, np.ndarray]:
    """Assign rows of data, of several sequences each, to samples.

    Args:
        sequences: `per_row` for each row.
        capacity: tokens of a sample.
        rows_per_sample: at most.

    Returns:
        The rows of each sample, int64 [n, rows_per_sample], and its sequences, int64 [n,
        rows_per_sample * per_row]; `EMPTY_SLOT` where there are fewer.
    """
    lengths = np.asarray([*map(len, sequences)], np.int64).reshape(-1, per_row).sum(axis=1)
    rows = pack_sequences(lengths, capacity, rows_per_sample)
    numbers = rows[..., None] * per_row + np.arange(per_row)
    slots = np.where(rows[..., None] == EMPTY_SLOT, EMPTY_SLOT, numbers)
    return rows, slots.reshape(len(rows), -1)


def truncate_sequences(
    sequences: Sequence[np.ndarray], length: int, num_end_tokens: int, keep_end: bool
) -> tuple[list[np.ndarray], TruncationCounts]:
    """Truncate token sequences to a length.

    Args:
        num_end_tokens: special tokens at the end, which stay.
        keep_end: tokens are removed at the beginning: the end matters, as in a conversation.
    """
    is_long = [len(ids) > length for ids in sequences]
    truncated = [
        ids
        if not long
        else ids[left_truncated_indices(len(ids), length, 0)]
        if keep_end
        else truncate_right(ids, length, num_end_tokens)
        for ids, long in zip(sequences, is_long, strict=True)
    ]
    return truncated, TruncationCounts(prompts=sum(is_long))
