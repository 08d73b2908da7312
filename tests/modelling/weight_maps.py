"""The weight map of a configuration, without adapters."""

from __future__ import annotations

from config.sections import RunConfig
from modelling.model_family import get_family
from modelling.weights import WeightMap


def base_weight_map(config: RunConfig) -> WeightMap:
    return get_family(config).base_weight_map(config)
