"""The registry of objectives: one line each."""

from __future__ import annotations

from collections.abc import Callable

from config.sections import RunConfig
from modelling.objectives.cross_entropy import CrossEntropy as CrossEntropy
from modelling.objectives.objective import WEIGHT as WEIGHT
from modelling.objectives.objective import Objective as Objective
from modelling.objectives.preference import KINDS
from modelling.objectives.preference import Preference as Preference

OBJECTIVES: dict[str, Callable[[RunConfig], Objective]] = {
    "cross_entropy": lambda config: CrossEntropy(),
    **dict.fromkeys(KINDS, Preference),
}


def objective_of(config: RunConfig) -> Objective:
    """The objective of a configuration."""
    return OBJECTIVES[config.training.objective](config)
