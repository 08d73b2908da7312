"""Learning-rate schedule by step, and the number of optimizer steps of a run.

Learning rates equal those of transformers' `get_*_schedule_with_warmup` and `Adafactor`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from config.errors import ConfigError
from config.lr_schedules import LR_SCHEDULES, LRProgress
from config.sections import LearningRate, RunConfig, Training


@dataclass(frozen=True)
class LRSchedule:
    """Learning rate as a function of the step, counted from 0.

    The learning rate grows linearly from 0 to its maximum over the warmup. A first step at learning
    rate 0 changes no weight, but fills the optimizer's moments, as with Hugging Face's schedules.
    After the last step the learning rate keeps its final value.
    """

    settings: LearningRate
    warmup_steps: int
    steps: int

    @classmethod
    def from_config(cls, training: Training) -> Self:
        """Create the learning-rate schedule of a training config, from step `start_step` on."""
        rate = training.optimizer.learning_rate
        steps, warmup = max(training.steps - rate.start_step, 0), rate.warmup_steps
        if warmup is None:
            warmup = math.ceil((rate.warmup_proportion or 0.0) * steps)
        return cls(rate, warmup, steps)

    def __call__(self, step: int) -> float:
        step = max(step - self.settings.start_step, 0)
        if step < self.warmup_steps:
            return self.settings.maximum * step / self.warmup_steps
        return LR_SCHEDULES[self.settings.function](
            self.settings, LRProgress(step, self.warmup_steps, self.steps)
        )


def lr_change_message(
    saved_training: Training, current_training: Training, step: int
) -> str | None:
    """Return a message if a resumed run has another learning rate than before; else None."""
    old, new = (
        LRSchedule.from_config(training)(step) for training in (saved_training, current_training)
    )
    if math.isclose(old, new, rel_tol=1e-6):
        return None
    rate = current_training.optimizer.learning_rate
    text = f"learning rate of step {step + 1}: {new:.3g}, not {old:.3g} as before"
    if rate.start_step == step or rate.function == "constant":
        return text
    prefix = "--training.optimizer.learning_rate"
    return (
        f"{text}; {prefix}.start_step {step} begins a new schedule here, {prefix}.function "
        f"constant keeps {rate.maximum:g}"
    )


def resolve_epochs(
    config: RunConfig, samples: int, steps_done: int = 0, samples_seen: int = 0
) -> RunConfig:
    """Convert `training.epochs` to `training.steps`; unchanged if epochs are not set.

    The remaining steps are rounded up to a multiple of `device_iterations`.

    Args:
        samples: number of samples of an epoch.
        steps_done: steps done so far, possibly with another batch size.
        samples_seen: samples read in those steps.
    """
    epochs, iterations = config.training.epochs, config.execution.device_iterations
    if epochs is None:
        return config
    samples_left = max(epochs * samples - samples_seen, 0)
    runs = math.ceil(samples_left / (config.training.global_batch_size * iterations))
    return replace(config, training=replace(config.training, steps=steps_done + runs * iterations))


def check_steps_divisible(config: RunConfig) -> None:
    """Raise ConfigError unless training.steps is a multiple of execution.device_iterations."""
    iterations = config.execution.device_iterations
    if config.training.epochs is None and config.training.steps % iterations:
        raise ConfigError(
            f"training.steps {config.training.steps} must be divisible by "
            f"execution.device_iterations {iterations}"
        )
