"""Samples of labeled sequences, for classification and regression.

Batches have, besides the arrays of `data.token_sequences`, a row for each sequence, float32:
    sequence_labels   [sequences, classes]   1 for its classes, 0 for the others; or its number
    is_labeled        [sequences, 1]         1, or 0 where a sample has fewer sequences
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.packing import EMPTY_SLOT
from data.samples import Samples, hash_arrays, sample_lengths
from data.truncation import Truncation

LABELS, IS_LABELED = "sequence_labels", "is_labeled"


@dataclass(frozen=True)
class LabeledSamples:
    """Token sequences with their labels.

    Attributes:
        samples: of the sequences' tokens.
        rows: int64 [n, places], the index of the sequence in each place, or `EMPTY_SLOT`.
        labels: float32 [sequences, classes].
    """

    samples: Samples
    rows: np.ndarray
    labels: np.ndarray

    @property
    def truncation(self) -> Truncation:
        """Counts of truncated sequences."""
        return self.samples.truncation

    @property
    def digest(self) -> str:
        tokens = np.frombuffer(bytes.fromhex(self.samples.digest), np.uint8)
        return hash_arrays(tokens, self.rows, self.labels)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sample, int64 [n]."""
        return sample_lengths(self.samples)

    def take(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Batch of the samples at `indices`, in their order: arrays by name."""
        positions = np.asarray(indices, np.int64)
        rows = self.rows[positions].reshape(-1)
        is_used = (rows != EMPTY_SLOT)[:, None].astype(np.float32)
        labels = self.labels[rows] * is_used
        return self.samples.take(positions) | {LABELS: labels, IS_LABELED: is_used}
