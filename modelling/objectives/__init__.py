"""Training objectives: losses, the inputs that they need, and their metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
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
    from modelling.objectives.registry import make_objective as make_objective
    from modelling.objectives.reward import RewardObjective as RewardObjective
    from modelling.objectives.token_outputs import HiddenStates as HiddenStates
    from modelling.objectives.token_outputs import TokenLogps as TokenLogps
else:
    lazy_exports(__name__)
