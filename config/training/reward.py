"""Training settings of reward models."""

from __future__ import annotations

from dataclasses import dataclass

from config.training.common import CommonTraining
from config.values import NonNegativeFloat


@dataclass(frozen=True)
class RewardTraining(CommonTraining):
    """Training settings of reward models."""

    center_rewards_coefficient: NonNegativeFloat = 0.0
    """reward: weight of the squared sum of a pair's rewards, which centers them; usually 0.01."""
