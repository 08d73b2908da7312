"""The training section: settings that all objectives have, and those of single objectives."""

from __future__ import annotations

from dataclasses import dataclass

from config.training.common import LearningRate as LearningRate
from config.training.common import Optimizer as Optimizer
from config.training.single_objectives import (
    ContrastiveTraining,
    DistillationTraining,
    LabelTraining,
    PolicyGradientTraining,
    PreferenceTraining,
    RewardTraining,
)


@dataclass(frozen=True)
class Training(
    PreferenceTraining,
    PolicyGradientTraining,
    LabelTraining,
    RewardTraining,
    DistillationTraining,
    ContrastiveTraining,
):
    """Settings that affect the result of training, unlike those of `Execution`."""
