"""Sequence packing: several token sequences in a sample of fixed length.

Several token sequences may share a sample, so that less of a batch is padding. Each has a number,
its segment, and attends to tokens of its own segment only; so a sample computes what its sequences
would compute alone (Raffel et al., arXiv:1910.10683, section 3.1.2, pack theirs the same way).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

EMPTY_SLOT = -1
"""Placeholder index of an unused slot in a sample."""


def pack_sequences(
    lengths: Sequence[int] | np.ndarray, capacity: int, max_per_sample: int
) -> np.ndarray:
    """Assign sequences to samples by the best-fit-decreasing heuristic.

    Longest first, each sequence goes to the sample with the least free space that holds it, else
    to a new one. With `max_per_sample` 1 the order stays.

    Args:
        lengths: tokens of each sequence, from 1 to `capacity`.
        capacity: tokens of a sample.
        max_per_sample: sequences of a sample, at most.

    Returns:
        int64 [samples, most]: the indices of each sample's sequences, then `EMPTY_SLOT`.
    """
    if max_per_sample == 1:
        return np.arange(len(lengths)).reshape(-1, 1)
    samples: list[list[int]] = []
    open_samples: list[list[int]] = [
        [] for _ in range(capacity + 1)
    ]  # by the tokens they have left
    room_bits = 0  # bit r: open_samples[r] is not empty
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[index])
        fitting_bits = room_bits >> length
        if fitting_bits:
            free = length + _lowest_set_bit_index(fitting_bits)
            sample = open_samples[free].pop()
            if not open_samples[free]:
                room_bits ^= 1 << free
        else:
            free, sample = capacity, len(samples)
            samples.append([])
        samples[sample].append(index)
        if len(samples[sample]) < max_per_sample and free > length:
            open_samples[free - length].append(sample)
            room_bits |= 1 << (free - length)
    out = np.full((len(samples), max_per_sample), EMPTY_SLOT, np.int64)
    for slots, indices in zip(out, samples, strict=True):
        slots[: len(indices)] = indices
    return out


def _lowest_set_bit_index(bits: int) -> int:
    """Index of the lowest set bit of an integer."""
    return (bits & -bits).bit_length() - 1


def concatenate_packed_sequences(
    sequence_indices: np.ndarray,
    get_token_ids: Callable[[int], np.ndarray],
    capacity: int,
    pad: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate each sample's sequences; returns token ids and segment ids.

    Args:
        sequence_indices: rows of what `pack_sequences` returns, int [samples, places].
        get_token_ids: returns the token ids of the sequence at an index, int32 [n].
        capacity: tokens of a sample.
        pad: token id after the last sequence.

    Returns:
        The tokens, and the number of each one's place in the sample, from 1 (0: padding), int32
        [samples, capacity] both.
    """
    input_ids = np.full((len(sequence_indices), capacity), pad, np.int32)
    segment_ids = np.zeros_like(input_ids)
    for sample, indices in enumerate(sequence_indices):
        start = 0
        for number, index in enumerate(indices[indices != EMPTY_SLOT], 1):
            tokens = get_token_ids(index)
            end = start + len(tokens)
            input_ids[sample, start:end], segment_ids[sample, start:end] = tokens, number
            start = end
    return input_ids, segment_ids
