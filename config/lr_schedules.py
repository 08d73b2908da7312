"""Learning-rate schedules after the warm-up, with the formulas of transformers' schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from config.run import LearningRate


class LRProgress(NamedTuple):
    """Progress of a learning-rate schedule: current step, warm-up steps and total steps."""

    step: int
    warmup: int
    steps: int

    def since(self, first: int) -> float:
        """Returns the completed fraction, 0 to 1, of the steps from step `first`."""
        return 1.0 if self.step >= self.steps else (self.step - first) / (self.steps - first)


LRFunction = Callable[["LearningRate", LRProgress], float]
"""The learning rate at a place after the warm-up."""


def _between(left: LRFunction) -> LRFunction:
    """Returns a schedule from the maximum to the minimum; `left` gives the remaining fraction."""
    return lambda rate, at: rate.minimum + (rate.maximum - rate.minimum) * left(rate, at)


def _half_cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


def _restarts(rate: LearningRate, at: LRProgress) -> float:
    done = at.since(at.warmup)
    return 0.0 if done >= 1.0 else _half_cosine(rate.num_cycles * done % 1.0)


def _stable(rate: LearningRate, at: LRProgress) -> float:
    decay = max(at.warmup, at.steps - math.ceil(rate.decay_proportion * at.steps))
    return _half_cosine(at.since(decay)) if at.step >= decay else 1.0


LR_SCHEDULES: Mapping[str, LRFunction] = {
    "linear": _between(lambda rate, at: 1.0 - at.since(at.warmup)),
    "cosine": _between(lambda rate, at: _half_cosine(at.since(at.warmup))),
    "cosine_with_restarts": _between(_restarts),
    "wsd": _between(_stable),
    "constant": lambda rate, at: rate.maximum,
    "relative": lambda rate, at: min(rate.maximum, 1.0 / math.sqrt(at.step + 1)),
}

if TYPE_CHECKING:
    LRScheduleName = str
else:
    LRScheduleName = Literal[tuple(LR_SCHEDULES)]
