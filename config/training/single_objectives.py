"""Training settings of single objectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from config.errors import ConfigError, ContradictionError
from config.training.common import CommonTraining
from config.values import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
)

ScaleRewards = Literal["group", "batch", "none"]

DAPO_EPSILON_HIGH = 0.28
"""Upper clipping range that DAPO's paper recommends (arXiv:2503.14476)."""

MAX_TOP_K = 1024


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


@dataclass(frozen=True)
class LabelTraining(CommonTraining):
    """Training settings of objectives of labeled sequences."""

    multi_label: bool | None = None
    """classification: a text can have several classes or none, each with its own probability. null:
    true if labels are lists."""


@dataclass(frozen=True)
class RewardTraining(CommonTraining):
    """Training settings of reward models."""

    center_rewards_coefficient: NonNegativeFloat = 0.0
    """reward: weight of the squared sum of a pair's rewards, which centers them; usually 0.01."""


@dataclass(frozen=True)
class ContrastiveTraining(CommonTraining):
    """Training settings of the contrastive objective."""

    pooling: Literal["mean", "last", "eos"] = "mean"
    """contrastive: embedding of a text, from the last hidden states. mean: of all its tokens; last:
    its last token; eos: an end token that is appended."""

    scale: PositiveFloat = 20.0
    """contrastive: factor on cosine similarities, 1 / temperature."""

    symmetric: bool = False
    """contrastive: average with the loss of finding the anchor of each positive."""

    bidirectional: bool = False
    """contrastive: without the causal mask of decoder-only models."""

    negatives: NonNegativeInt = 0
    """contrastive: hard negatives read from each row."""

    @property
    def texts_per_row(self) -> int:
        """Number of texts in a contrastive row: anchor, positive and negatives."""
        return 2 + self.negatives


@dataclass(frozen=True)
class DistillationTraining(CommonTraining):
    """Training settings of distillation from a teacher."""

    teacher: PathText | None = None
    """distill: the teacher, a Hugging Face model or a run, with the student's vocabulary."""

    teacher_quantization: Literal["int8", "int4"] | None = None
    """distill: weight quantization of the teacher. null: as in its run."""

    top_k: PositiveInt | None = 32
    """distill: likeliest tokens of the teacher stored per position, 6 bytes each. null: compare all
    tokens, by its last hidden states and its head."""

    distill_weight: Fraction = 0.5
    """distill: weight of the divergence from the teacher; 1 minus this is the cross-entropy's."""

    distill_rest: Literal["renormalise", "bin"] = "renormalise"
    """distill: renormalise the likeliest tokens' probabilities, or put all other tokens into one
    bin, which adds no bias."""

    teacher_cache: PathText | None = None
    """distill: folder of the teacher's outputs that runs can share. null: the run's own."""

    @property
    def has_teacher_head(self) -> bool:
        """True if the student's program has the teacher's head."""
        return self.objective == "distill" and self.top_k is None

    @property
    def rest_temperature(self) -> float:
        """Temperature at which the teacher's other tokens are summed up; 1 if they are not read."""
        return self.temperature if self.distill_rest == "bin" else 1.0

    def validate(self) -> None:
        super().validate()
        if self.objective == "distill" and self.teacher is None:
            raise ConfigError(
                f"{self.objective} learns from another model: give --training.teacher FOLDER"
            )
        if self.objective == "distill" and self.resolved_beta > 1:
            raise ConfigError(f"training.beta {self.resolved_beta:g} of distill must be at most 1")
        if self.top_k is None:
            if self.distill_rest == "bin":
                raise ContradictionError(
                    "training.distill_rest bin is for tokens outside the likeliest ones, but "
                    "training.top_k null compares all tokens",
                    {"training.distill_rest": "renormalise"},
                    "training.top_k",
                )
            return
        if self.objective == "distill" and self.beta and self.distill_rest != "bin":
            raise ContradictionError(
                "training.beta compares with the student's probability of all tokens: set "
                "training.distill_rest bin or training.top_k null",
                {"training.distill_rest": "bin"},
                "training.beta",
            )
        if self.top_k > MAX_TOP_K:
            raise ConfigError(
                f"training.top_k {self.top_k} must be at most {MAX_TOP_K}; null takes all tokens"
            )
