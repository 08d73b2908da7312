"""The registry of objectives: one line each."""

from __future__ import annotations

from config.sections import RunConfig
from modelling.objectives.cross_entropy import CrossEntropy as CrossEntropy
from modelling.objectives.objective import WEIGHT as WEIGHT
from modelling.objectives.objective import Objective as Objective

OBJECTIVES: dict[str, type[Objective]] = {"cross_entropy": CrossEntropy}


def objective_of(config: RunConfig) -> Objective:
    """The objective of a configuration: today all learn the next token."""
    return OBJECTIVES["cross_entropy"]()
