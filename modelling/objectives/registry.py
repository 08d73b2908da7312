"""The registry of training objectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from config.sections import RunConfig
    from modelling.objectives.objective import Objective


def make_objective(config: RunConfig) -> Objective:
    """Creates the training objective of a configuration."""
    return _objective_class(config)(config)


def _objective_class(config: RunConfig) -> Callable[[RunConfig], Objective]:
    # Each import stands where its class is chosen: a start needs one objective.
    match config.training.row_type:
        case "paired" | "unpaired":
            from modelling.objectives.preference import PreferenceObjective

            return PreferenceObjective
        case "labeled" | "scored":
            from modelling.objectives.pooled import LabelObjective

            return LabelObjective
        case "compared":
            from modelling.objectives.reward import RewardObjective

            return RewardObjective
        case "contrastive":
            from modelling.objectives.contrastive import Contrastive

            return Contrastive
        case "rollout":
            from modelling.objectives.policy_gradient import PolicyGradient

            return PolicyGradient
    if config.training.has_teacher_head:
        from modelling.objectives.full_distillation import FullDistillation

        return FullDistillation
    if config.training.objective == "distill":
        from modelling.objectives.distillation import Distillation

        return Distillation
    from modelling.objectives.cross_entropy import CrossEntropy

    return CrossEntropy
