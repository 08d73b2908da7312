"""Training by passes over the data."""

from __future__ import annotations

import math
from dataclasses import replace

from config.sections import RunConfig


def with_steps(config: RunConfig, samples: int) -> RunConfig:
    """The configuration with as many steps as `training.epochs` of `samples` samples take.

    Rounded up to whole runs of `device_iterations` steps. Unchanged if epochs is not given.
    """
    epochs, iterations = config.training.epochs, config.execution.device_iterations
    if epochs is None:
        return config
    runs = math.ceil(epochs * samples / (config.training.global_batch_size * iterations))
    return replace(config, training=replace(config.training, steps=runs * iterations))
