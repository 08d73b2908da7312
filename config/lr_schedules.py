"""Learning-rate schedules after the warm-up, with the formulas of transformers' schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from config.training import LearningRate


class LRProgress(NamedTuple):
    """Progress of a learning-rate schedule: current step, warm-up steps and total steps."""

    step: int
    warmup: int
    steps: int

    def completed_fraction_since(self, first_step: int) -> float:
        """Returns the completed fraction, 0 to 1, of the steps from step `first_step`."""
        return (
            1.0 if self.step >= self.steps else (self.step - first_step) / (self.steps - first_step)
        )


LRFunction = Callable[["LearningRate", LRProgress], float]
"""The learning rate at a place after the warm-up."""


def _interpolate_lr(remaining: LRFunction) -> LRFunction:
    """Returns an LR schedule from maximum to minimum, given the function of the fraction left."""
    return lambda lr, progress: lr.minimum + (lr.maximum - lr.minimum) * remaining(lr, progress)


def _half_cosine(completed_fraction: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * completed_fraction))


def _cosine_with_restarts(lr: LearningRate, progress: LRProgress) -> float:
    completed = progress.completed_fraction_since(progress.warmup)
    return 0.0 if completed >= 1.0 else _half_cosine(lr.num_cycles * completed % 1.0)


def _warmup_stable_decay(lr: LearningRate, progress: LRProgress) -> float:
    decay = max(progress.warmup, progress.steps - math.ceil(lr.decay_proportion * progress.steps))
    return _half_cosine(progress.completed_fraction_since(decay)) if progress.step >= decay else 1.0


LR_SCHEDULES: Mapping[str, LRFunction] = {
    "linear": _interpolate_lr(
        lambda lr, progress: 1.0 - progress.completed_fraction_since(progress.warmup)
    ),
    "cosine": _interpolate_lr(
        lambda lr, progress: _half_cosine(progress.completed_fraction_since(progress.warmup))
    ),
    "cosine_with_restarts": _interpolate_lr(_cosine_with_restarts),
    "wsd": _interpolate_lr(_warmup_stable_decay),
    "constant": lambda lr, progress: lr.maximum,
    "relative": lambda lr, progress: min(lr.maximum, 1.0 / math.sqrt(progress.step + 1)),
}

if TYPE_CHECKING:
    LRScheduleName = str
else:
    LRScheduleName = Literal[tuple(LR_SCHEDULES)]
