"""The weight table of a configuration, without adapters."""

from __future__ import annotations

from config.sections import RunConfig
from modelling.spec import family_of
from modelling.weights import WeightTable


def weight_table(config: RunConfig) -> WeightTable:
    return family_of(config).table(config)
