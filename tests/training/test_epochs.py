"""Epochs as numbers of steps."""

from __future__ import annotations

import pytest

from config.t5 import T5Config
from training.schedule import with_steps


@pytest.mark.parametrize(
    ("epochs", "iterations", "steps"), [(None, 1, 500), (1, 1, 4), (3, 1, 10), (3, 4, 12)]
)
def test_steps_of_epochs(epochs, iterations, steps):
    config = T5Config.from_dict(
        {
            "training": {"epochs": epochs, "global_batch_size": 32},
            "execution": {"device_iterations": iterations},
        }
    )
    assert with_steps(config, samples=101).training.steps == steps
