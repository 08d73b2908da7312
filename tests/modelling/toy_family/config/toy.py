"""The configuration of a toy family, a minimal decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from config.sections import Model, RunConfig
from config.task import CausalLMData
from config.values import NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class ToyModel(Model):
    """The model."""

    heads: PositiveInt = 2
    """Number of attention heads."""

    output_length: PositiveInt = 4
    """Most tokens that are generated, the end token included."""

    eos_token_id: NonNegativeInt = 0
    pad_token_id: NonNegativeInt = 1


@dataclass(frozen=True)
class ToyData(CausalLMData):
    """Data of training and validation."""

    packing: bool = False
    """Join the texts and cut them into full samples, or, if false, pad each to a sample."""


@dataclass(frozen=True)
class ToyConfig(RunConfig):
    """A run of the toy family."""

    family: Literal["toy"] = "toy"
    """The model family."""

    model: ToyModel = field(default_factory=ToyModel)
    data: ToyData = field(default_factory=ToyData)
