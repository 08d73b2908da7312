"""Training settings of objectives of whole sequences: classes, rewards and embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from config.training.common import CommonTraining
from config.values import NonNegativeFloat, NonNegativeInt, PositiveFloat


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
