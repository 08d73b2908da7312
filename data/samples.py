"""Several token sequences in a sample: fewer positions of a batch are padding.

Each sequence keeps to itself by a number, its segment, which attention compares; so a sample
computes what its sequences would, each alone (Raffel et al., arXiv:1910.10683, section 3.1.2, pack
theirs the same way).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from data.lengths import Cuts
from data.pairs import IGNORE_INDEX, EncodedExamples, shift_right

EMPTY = -1
"""In place of a sequence's index: nothing is there."""


def pack(lengths: Sequence[int] | np.ndarray, capacity: int, most: int) -> np.ndarray:
    """Share sequences out to samples.

    Best fit, longest first: a sequence goes to the sample that it fills best, or opens one. `most`
    1 keeps the order.

    Args:
        lengths: tokens of each sequence, from 1 to `capacity`.
        capacity: tokens of a sample.
        most: sequences of a sample, at most.

    Returns:
        int64 [samples, most]: the indices of each sample's sequences, then `EMPTY`.
    """
    if most == 1:
        return np.arange(len(lengths)).reshape(-1, 1)
    samples: list[list[int]] = []
    open_samples: list[list[int]] = [
        [] for _ in range(capacity + 1)
    ]  # by the tokens they have left
    rooms = 0  # bit r: open_samples[r] is not empty
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[index])
        fitting = rooms >> length
        if fitting:
            room = length + _lowest_bit(fitting)
            sample = open_samples[room].pop()
            if not open_samples[room]:
                rooms ^= 1 << room
        else:
            room, sample = capacity, len(samples)
            samples.append([])
        samples[sample].append(index)
        if len(samples[sample]) < most and room > length:
            open_samples[room - length].append(sample)
            rooms |= 1 << (room - length)
    out = np.full((len(samples), most), EMPTY, np.int64)
    for slots, indices in zip(out, samples, strict=True):
        slots[: len(indices)] = indices
    return out


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def lay_out(
    samples: np.ndarray, tokens_of: Callable[[int], np.ndarray], capacity: int, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lay the sequences of each sample one after the other.

    Args:
        samples: what `pack` returns, or some of it.
        tokens_of: the tokens of the sequence at an index.

    Returns:
        The tokens, and the number of each one's place in the sample, from 1 (0: padding), int32
        [samples, capacity] both.
    """
    words = np.full((len(samples), capacity), pad, np.int32)
    segments = np.zeros_like(words)
    for sample, indices in enumerate(samples):
        start = 0
        for place, index in enumerate(indices[indices != EMPTY], 1):
            tokens = tokens_of(index)
            end = start + len(tokens)
            words[sample, start:end], segments[sample, start:end] = tokens, place
            start = end
    return words, segments


@dataclass(frozen=True)
class PackedExamples:
    """Examples for an encoder-decoder model, several in a sample.

    Attributes:
        examples: each by itself.
        samples: int64 [n, places], see `pack`.
    """

    examples: EncodedExamples
    samples: np.ndarray

    @classmethod
    def of(cls, examples: EncodedExamples, most: int) -> PackedExamples:
        """Pack all examples into samples of their `sequence_length`, `most` in each."""
        lengths = np.diff(examples.starts)
        return cls(examples, pack(lengths, examples.sequence_length, most))

    @property
    def cuts(self) -> Cuts:
        """What was cut or dropped."""
        return self.examples.cuts

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The batch of the samples at `indices`, in their order, int32.

        `input_ids` and `attention_mask` are [n, sequence_length], the mask with the places' numbers
        as in `lay_out`; `decoder_input_ids` and `labels` have a sequence for each place,
        [n * places, decoder_sequence_length].
        """
        found, samples = self.examples, self.samples[np.asarray(indices, np.int64)]
        words, segments = lay_out(samples, found.prompt, found.sequence_length, found.pad)
        taken = samples.reshape(-1)
        labels = np.where(taken[:, None] == EMPTY, IGNORE_INDEX, found.targets[taken])
        return {
            "input_ids": words,
            "attention_mask": segments,
            "decoder_input_ids": shift_right(labels, found.pad),
            "labels": labels.astype(np.int32),
        }
