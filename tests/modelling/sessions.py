"""Sessions of a configuration, whose family is looked up."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from config.sections import RunConfig
from modelling.sessions.generating import Inference
from modelling.sessions.training import FineTuning

ConfigT = TypeVar("ConfigT", bound=RunConfig)


def transposed(config: ConfigT, wanted: bool = True) -> ConfigT:
    """The configuration with activations (length, batch, hidden), if wanted."""
    execution = replace(config.execution, transpose_batch_sequence=wanted)
    return replace(config, execution=execution)


def fine_tuning(config: RunConfig, gradients: bool = False) -> FineTuning:
    return FineTuning(config, gradients=gradients)


def inference(config: RunConfig) -> Inference:
    return Inference(config)
