"""What is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Way = Literal["naive", "local"]
WAYS: tuple[Way, ...] = ("naive", "local")
COUNTS = (1, 2, 8, 32, 64)


@dataclass(frozen=True)
class Size:
    """A causal transformer and its batch. The global batch is the same whatever the accumulation.

    Attributes:
        batch: samples of a global batch.
        rate: learning rate of AdamW.
    """

    layers: int = 2
    hidden: int = 192
    heads: int = 4
    vocabulary: int = 512
    length: int = 16
    batch: int = 512
    rate: float = 1e-3

    def samples(self, steps: int) -> np.ndarray:
        """Global batches: int32 (steps, batch, length + 1), learnable: each token follows from the
        one before, with some noise."""
        rng = np.random.default_rng(0)
        shape = (steps, self.batch, self.length + 1)
        tokens = np.empty(shape, np.int32)
        tokens[..., 0] = rng.integers(0, self.vocabulary, shape[:2])
        for i in range(1, shape[2]):
            tokens[..., i] = (
                3 * tokens[..., i - 1] + rng.integers(0, 3, shape[:2])
            ) % self.vocabulary
        return tokens


@dataclass(frozen=True)
class Measured:
    """One way of accumulating.

    Attributes:
        processes, devices: on which it ran; devices of all processes.
        micro_batches: on each device in a step.
        seconds: of a step, the median.
        reduced: bytes that a device brings into reductions in a step.
        reductions: how many reductions a device takes part in.
        losses: of the first steps.
    """

    way: Way
    processes: int
    devices: int
    micro_batches: int
    seconds: float
    reduced: int
    reductions: int
    losses: list[float]
