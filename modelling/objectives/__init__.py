"""The registry of training objectives."""

from __future__ import annotations

from collections.abc import Callable

from config.sections import RunConfig
from modelling.objectives.contrastive import Contrastive as Contrastive
from modelling.objectives.cross_entropy import CrossEntropy as CrossEntropy
from modelling.objectives.distillation import Distillation as Distillation
from modelling.objectives.distillation import TopTokens as TopTokens
from modelling.objectives.full_distillation import TEACHER_LOGITS as TEACHER_LOGITS
from modelling.objectives.full_distillation import FullDistillation as FullDistillation
from modelling.objectives.full_distillation import TeacherStates as TeacherStates
from modelling.objectives.objective import LOSS_WEIGHT as LOSS_WEIGHT
from modelling.objectives.objective import Objective as Objective
from modelling.objectives.policy_gradient import POLICY_LOSSES
from modelling.objectives.policy_gradient import PolicyGradient as PolicyGradient
from modelling.objectives.pooled import LabelObjective
from modelling.objectives.preference import PREFERENCE_LOSSES
from modelling.objectives.preference import PreferenceObjective as PreferenceObjective
from modelling.objectives.reward import RewardObjective
from modelling.objectives.token_outputs import HiddenStates as HiddenStates
from modelling.objectives.token_outputs import TokenLogps as TokenLogps


def _make_distillation(config: RunConfig) -> Distillation:
    return FullDistillation(config) if config.training.holds_teacher else Distillation(config)


OBJECTIVES: dict[str, Callable[[RunConfig], Objective]] = {
    "cross_entropy": CrossEntropy,
    "distill": _make_distillation,
    **dict.fromkeys(PREFERENCE_LOSSES, PreferenceObjective),
    **dict.fromkeys(("classification", "regression"), LabelObjective),
    "contrastive": Contrastive,
    "reward": RewardObjective,
    **dict.fromkeys(POLICY_LOSSES, PolicyGradient),
}


def make_objective(config: RunConfig) -> Objective:
    """Returns the training objective of a configuration."""
    return OBJECTIVES[config.training.objective](config)
