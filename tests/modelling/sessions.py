"""Sessions of a configuration, whose family is looked up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from config.sections import RunConfig
from sessions.generation import GenerationSession
from sessions.training import TrainingSession

ConfigT = TypeVar("ConfigT", bound=RunConfig)


def transposed(config: ConfigT, wanted: bool = True) -> ConfigT:
    """The configuration with activations (length, batch, hidden), if wanted."""
    execution = replace(config.execution, transpose_batch_sequence=wanted)
    return replace(config, execution=execution)


def fine_tuning(config: RunConfig, gradients: bool = False) -> TrainingSession:
    return TrainingSession(config, gradients=gradients)


def check_continuing(
    model: TrainingSession,
    weights: Mapping[str, np.ndarray],
    train: Callable[[TrainingSession, int, int], None],
) -> dict[str, np.ndarray]:
    """Four steps from `weights` are bit for bit two and, from the state read then, two more.

    Args:
        train: trains an entered model from one step to another.

    Returns:
        The state after two steps.
    """
    model.write(weights)
    with model:
        train(model, 0, 2)
        half = dict(model.read())
        train(model, 2, 4)
        expected = dict(model.read())
    model.write(half)
    with model:
        train(model, 2, 4)
        found = dict(model.read())
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    return half


def inference(config: RunConfig) -> GenerationSession:
    return GenerationSession(config)
