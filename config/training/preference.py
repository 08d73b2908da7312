"""Training settings of preference objectives."""

from __future__ import annotations

from dataclasses import dataclass

from config.errors import ContradictionError
from config.training.common import CommonTraining
from config.values import Fraction, NonNegativeFloat, PathText, PositiveFloat

SMOOTHED = ("dpo", "simpo", "cpo")
"""Objectives with a `label_smoothing`."""


@dataclass(frozen=True)
class PreferenceTraining(CommonTraining):
    """Training settings of preference objectives."""

    beta: PositiveFloat = 0.1
    """Preferences: the weight of log-probabilities; orpo: of the odds."""

    gamma: NonNegativeFloat = 0.5
    """simpo: the margin that is aimed at."""

    label_smoothing: Fraction = 0.0
    """dpo, simpo, cpo: fraction of the pairs thought to be in the wrong order."""

    reference_cache: PathText | None = None
    """Folder of the reference model's log-probabilities, which runs can share. null: that of the
    run."""

    def validate(self) -> None:
        super().validate()
        if self.label_smoothing and self.objective not in SMOOTHED:
            raise ContradictionError(
                f"training.label_smoothing is for {', '.join(SMOOTHED)}, not for {self.objective}: "
                "leave it 0",
                {"training.label_smoothing": 0.0},
                "training.objective",
            )
