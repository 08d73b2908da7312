"""The registry of training objectives."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
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
    from modelling.objectives.policy_gradient import PolicyGradient as PolicyGradient
    from modelling.objectives.pooled import LabelObjective as LabelObjective
    from modelling.objectives.preference import PreferenceObjective as PreferenceObjective
    from modelling.objectives.reward import RewardObjective as RewardObjective
    from modelling.objectives.token_outputs import HiddenStates as HiddenStates
    from modelling.objectives.token_outputs import TokenLogps as TokenLogps
else:
    lazy_exports(__name__)

_CLASSES = {"cross_entropy": "CrossEntropy", "distill": "Distillation"}
_CLASS_BY_ROW_TYPE = {
    **dict.fromkeys(("paired", "unpaired"), "PreferenceObjective"),
    **dict.fromkeys(("labeled", "scored"), "LabelObjective"),
    "compared": "RewardObjective",
    "contrastive": "Contrastive",
    "rollout": "PolicyGradient",
}


def make_objective(config: RunConfig) -> Objective:
    """Returns the training objective of a configuration."""
    name, row_type = config.training.objective, config.training.row_type
    class_name = _CLASSES[name] if row_type is None else _CLASS_BY_ROW_TYPE[row_type]
    if config.training.holds_teacher:
        class_name = "FullDistillation"
    objective: Objective = getattr(sys.modules[__name__], class_name)(config)
    return objective
