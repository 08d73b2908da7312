"""Training settings of preference objectives."""

from __future__ import annotations

from dataclasses import dataclass

from config.training.common import CommonTraining
from config.values import NonNegativeFloat, PathText, PositiveFloat


@dataclass(frozen=True)
class PreferenceTraining(CommonTraining):
    """Training settings of preference objectives."""

    beta: PositiveFloat = 0.1
    """Preferences: the weight of log-probabilities; orpo: of the odds."""

    gamma: NonNegativeFloat = 0.5
    """simpo: the margin that is aimed at."""

    reference_cache: PathText | None = None
    """Folder of the reference model's log-probabilities, which runs can share. null: that of the
    run."""
