"""Training batches in an order that a checkpoint can continue.

Own and not grain: our data are token ids in memory, so there is no reading or decoding for
worker processes to speed up, and what is left of a loader is a permutation and a position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from data.lengths import Cuts
from files.json_files import Fields


class Samples(Protocol):
    """What a loader reads: a number of samples, what was cut, and batches of chosen ones."""

    @property
    def cuts(self) -> Cuts: ...

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]: ...


def order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of `count` samples in an epoch: int64 [count], a function of the arguments alone.

    By sorting raw output of the Philox generator and not by `permutation`: numpy guarantees the
    former to stay the same in later versions, but not the latter.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(keys, kind="stable")


class Loader:
    """Endless global batches: every epoch has each sample once, in an order of its own.

    A batch that an epoch cannot fill goes on in the next epoch, so that all batches are full and
    no sample is left out. Batches do not depend on how the devices share the work.
    """

    def __init__(
        self, samples: Samples, batch_size: int, seed: int, own: np.ndarray | None = None
    ) -> None:
        """Begin with the first epoch.

        Args:
            batch_size: samples in a global batch.
            own: which of them, int [n], are wanted here; None: all.

        Raises:
            ValueError: there are no samples.
        """
        if len(samples) == 0:
            raise ValueError("there are no samples to train on: give a data set that has some")
        self._samples = samples
        self._batch_size = batch_size
        self._seed, self._own = seed, own
        self._go_to(epoch=0, position=0)

    @property
    def samples(self) -> int:
        """Samples in an epoch."""
        return len(self._samples)

    def next_batch(self) -> dict[str, np.ndarray]:
        """The samples of the next global batch that are wanted here: arrays [n, ...]."""
        chosen: list[np.ndarray] = []
        missing = self._batch_size
        while missing:
            part = self._order[self._position : self._position + missing]
            chosen.append(part)
            missing -= len(part)
            self._position += len(part)
            if self._position == len(self._order):
                self._go_to(self._epoch + 1, 0)
        batch = np.concatenate(chosen)
        return self._samples.take(batch if self._own is None else batch[self._own])

    def state(self) -> dict[str, int]:
        """Where the next batch starts: plain numbers, for a checkpoint."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "samples": len(self._samples),
        }

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue where `state` was taken: the same batches follow, bit for bit.

        The batch size may be another one. The state's seed replaces the one given at construction.

        Raises:
            ValueError: the state belongs to another data set.
            FileError: it is no such state.
        """
        found = Fields(dict(state), "the saved data position")
        seed, epoch, position, samples = map(found.count, ("seed", "epoch", "position", "samples"))
        if samples != len(self._samples):
            raise ValueError(
                f"the data position was saved with {samples} samples, but there are "
                f"{len(self._samples)}: continue with the same data set, or start anew"
            )
        if position >= samples:
            raise ValueError(f"the saved data position {position} is not among {samples} samples")
        self._seed = seed
        self._go_to(epoch, position)

    def _go_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = order(self._seed, epoch, len(self._samples))
