"""Training settings of preference objectives."""

from __future__ import annotations

from dataclasses import dataclass

from config.errors import ConfigError
from config.training.common import CommonTraining
from config.values import NonNegativeFloat, PathText


@dataclass(frozen=True)
class PreferenceTraining(CommonTraining):
    """Training settings of preference objectives."""

    gamma: NonNegativeFloat = 0.5
    """simpo: target margin."""

    reference_cache: PathText | None = None
    """Folder of the reference model's log-probabilities that runs can share. null: the run's
    own."""

    def validate(self) -> None:
        super().validate()
        if self.learns_preferences and not self.resolved_beta:
            raise ConfigError(
                f"training.beta is 0, but {self.objective} needs a positive number: give one"
            )
