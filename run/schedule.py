"""How many steps there are, and the learning rate of each: as transformers'
`get_*_schedule_with_warmup` gives it, or as its `Adafactor` computes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

from config.errors import ConfigError
from config.sections import RunConfig, Training


@dataclass(frozen=True)
class Schedule:
    """Call it with a step, counted from 0, to get that step's learning rate.

    The rate grows linearly from 0 to `maximum` over the warm-up; a first step at rate 0 changes no
    weight, but fills the optimizer's means, and runs stay comparable with Hugging Face's. After the
    last step the rate stays at its end value.
    """

    function: Literal["linear", "constant", "cosine", "relative"]
    maximum: float
    warmup_steps: int
    steps: int
    minimum: float = 0.0

    @classmethod
    def of(cls, training: Training) -> Self:
        """The schedule of a configuration."""
        rate = training.optimizer.learning_rate
        warmup = rate.warmup_steps
        if warmup is None:
            warmup = math.ceil((rate.warmup_proportion or 0.0) * training.steps)
        return cls(rate.function, rate.maximum, warmup, training.steps, rate.minimum)

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.maximum * step / self.warmup_steps
        if self.function == "relative":
            return min(self.maximum, 1.0 / math.sqrt(step + 1))
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        if self.function == "constant":
            return self.maximum
        return self.minimum + (self.maximum - self.minimum) * self._left(min(done, 1.0))

    def _left(self, done: float) -> float:
        """The fraction of the way from minimum to maximum that is left when the fraction `done` of
        the decay is over."""
        return 1.0 - done if self.function == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def with_steps(config: RunConfig, samples: int) -> RunConfig:
    """The configuration with as many steps as `training.epochs` of `samples` samples take.

    Rounded up to whole runs of `device_iterations` steps. Unchanged if epochs is not given.
    """
    epochs, iterations = config.training.epochs, config.execution.device_iterations
    if epochs is None:
        return config
    runs = math.ceil(epochs * samples / (config.training.global_batch_size * iterations))
    return replace(config, training=replace(config.training, steps=runs * iterations))


def check_iterations(config: RunConfig) -> None:
    """Raise ConfigError unless the steps are whole runs of the program."""
    iterations = config.execution.device_iterations
    if config.training.epochs is None and config.training.steps % iterations:
        raise ConfigError(
            f"training.steps {config.training.steps} must be divisible by "
            f"execution.device_iterations {iterations}"
        )
