"""How a global batch is dealt to the replicas of a program, some of which are of this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

Batch = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Deal:
    """Which samples of a global batch a replica gets.

    Replica r belongs to data-parallel copy r // tensor_parallel; the replicas of a copy get the
    same samples. Micro-batch a of copy d has the samples from
    (a * data_parallel + d) * micro_batch_size on: the batch is read in order, so every split of it
    computes the same samples.

    Attributes:
        micro_batches: of each copy.
        own: the replicas that the host streams of this process feed; default: all.
    """

    data_parallel: int
    tensor_parallel: int
    micro_batches: int
    own: slice = field(default_factory=lambda: slice(None))

    @property
    def _copies(self) -> np.ndarray:
        """The copy of each own replica."""
        return np.repeat(np.arange(self.data_parallel), self.tensor_parallel)[self.own]

    @property
    def _own_copies(self) -> int:
        return int(self._copies[-1] - self._copies[0]) + 1

    def positions(self, count: int) -> np.ndarray:
        """Where in a global batch of so many samples the own ones are: int64, in order.

        Raises:
            ValueError: the batch cannot be cut evenly.
        """
        if count % (self.micro_batches * self.data_parallel):
            raise ValueError(
                f"a global batch of {count} samples cannot be cut into {self.micro_batches} "
                f"micro-batches for each of {self.data_parallel} data-parallel copies"
            )
        by_copy = np.arange(count).reshape(self.micro_batches, self.data_parallel, -1)
        first = self._copies[0]
        return by_copy[:, first : first + self._own_copies].reshape(-1)

    def to_replicas(self, samples: np.ndarray) -> np.ndarray:
        """Give each own replica its micro-batches.

        Args:
            samples: [own samples, ...], those at `positions`; an array may have several rows for a
                sample.

        Returns:
            [micro_batches, own replicas, micro_batch, ...], as host streams take it.
        """
        return self._by_copy(samples)[:, self._copies - self._copies[0]]

    def once(self, batch: Batch) -> Batch:
        """The own samples that no process before this one has: over all, each sample once."""
        first = self.own.start or 0
        if first % self.tensor_parallel == 0:
            return batch
        others = {name: self._by_copy(array)[:, 1:] for name, array in batch.items()}
        return {name: array.reshape(-1, *array.shape[3:]) for name, array in others.items()}

    def _by_copy(self, samples: np.ndarray) -> np.ndarray:
        """[micro_batches, own copies, micro_batch, ...]."""
        parts = self.micro_batches, self._own_copies
        return samples.reshape(*parts, len(samples) // (parts[0] * parts[1]), *samples.shape[1:])
