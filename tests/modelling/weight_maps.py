"""The weight map of a configuration, without adapters."""

from __future__ import annotations

from config.sections import RunConfig
from modelling.spec import family_of
from modelling.weights import WeightMap


def base_weight_map(config: RunConfig) -> WeightMap:
    return family_of(config).base_weight_map(config)
