"""Generated batches for benchmarks: random tokens, lengths and answers, in real batches' form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.encoding import IGNORE_INDEX, shift_right

PAD, EOS, FIRST_WORD = 0, 1, 3


@dataclass(frozen=True)
class GeneratedExamples:
    """Any number of samples; each is a function of the seed and its index alone.

    Attributes:
        count: how many samples there are.
        vocab_size: ids are below it.
        sequence_length: prompts have from half of it up to all of it as tokens, `</s>` included.
        decoder_sequence_length: targets have from two tokens (one if there is no room) up to it.
    """

    count: int
    vocab_size: int
    sequence_length: int
    decoder_sequence_length: int
    seed: int

    @property
    def truncated(self) -> int:
        """How many samples were too long: none."""
        return 0

    def __len__(self) -> int:
        return self.count

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The batch of the samples at `indices`: the arrays of `data.encoding`."""
        rngs = [np.random.default_rng([self.seed, int(index)]) for index in indices]
        source, longest = self.sequence_length, self.decoder_sequence_length
        words = [self._words(rng, (source + 1) // 2, source) for rng in rngs]
        targets = [self._words(rng, min(2, longest), longest) for rng in rngs]
        input_ids = _padded(words, source, PAD)
        labels = _padded(targets, longest, IGNORE_INDEX)
        lengths = np.array([len(ids) for ids in words]).reshape(-1, 1)
        return {
            "input_ids": input_ids,
            "attention_mask": (np.arange(source) < lengths).astype(np.int32),
            "decoder_input_ids": shift_right(labels, PAD),
            "labels": labels,
        }

    def _words(self, rng: np.random.Generator, shortest: int, longest: int) -> np.ndarray:
        """Ids of words, ended by `</s>`; `shortest` to `longest` of them."""
        length = rng.integers(shortest, longest, endpoint=True)
        return np.append(rng.integers(FIRST_WORD, self.vocab_size, length - 1), EOS)


def _padded(rows: list[np.ndarray], length: int, value: int) -> np.ndarray:
    """Rows of different lengths as one int32 [rows, length]."""
    out = np.full((len(rows), length), value, np.int32)
    for padded, row in zip(out, rows, strict=True):
        padded[: len(row)] = row
    return out
