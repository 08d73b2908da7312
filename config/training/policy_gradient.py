"""Training settings of policy gradients from stored rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from config.errors import ContradictionError
from config.training.common import CommonTraining
from config.values import Fraction, PositiveFloat, PositiveInt

ScaleRewards = Literal["group", "batch", "none"]

DAPO_EPSILON_HIGH = 0.28
"""Upper clipping range that DAPO's paper recommends (arXiv:2503.14476)."""


@dataclass(frozen=True)
class PolicyGradientTraining(CommonTraining):
    """Training settings of policy gradients from stored rollouts, in TRL's names."""

    epsilon: Fraction = 0.2
    """Policy gradients: the probability ratio to the old policy is clipped at 1 - epsilon."""

    epsilon_high: PositiveFloat | None = None
    """Policy gradients: the ratio is clipped at 1 + epsilon_high. null: epsilon; dapo: 0.28."""

    scale_rewards: ScaleRewards | None = None
    """Policy gradients: divide advantages by the standard deviation of rewards in a group, in the
    batch, or not (none). null: group; dr_grpo, rloo: none."""

    max_completion_length: PositiveInt = 512
    """dr_grpo: divisor of each completion's summed loss."""

    mask_truncated_completions: bool | None = None
    """Policy gradients: leave completions without an end token out of the loss. null: only of
    dapo."""

    def validate(self) -> None:
        super().validate()
        if self.objective == "rloo" and self.scale_rewards == "group":
            raise ContradictionError(
                "training.scale_rewards group is not for rloo, whose baseline is the mean of a "
                "group's other rewards: give batch or none",
                {"training.scale_rewards": None},
                "training.objective",
            )

    @property
    def resolved_epsilon_high(self) -> float:
        """`epsilon_high`, or the objective's default."""
        default = DAPO_EPSILON_HIGH if self.objective == "dapo" else self.epsilon
        return default if self.epsilon_high is None else self.epsilon_high

    @property
    def resolved_scale_rewards(self) -> ScaleRewards:
        """`scale_rewards`, or the objective's default."""
        default: ScaleRewards = "none" if self.objective in ("dr_grpo", "rloo") else "group"
        return default if self.scale_rewards is None else self.scale_rewards

    @property
    def masks_truncated_completions(self) -> bool:
        """True if completions without an end token are not in the loss."""
        default = self.objective == "dapo"
        masks = self.mask_truncated_completions
        return default if masks is None else masks
