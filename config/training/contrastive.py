"""Training settings of the contrastive objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from config.training.common import CommonTraining
from config.values import NonNegativeInt, PositiveFloat


@dataclass(frozen=True)
class ContrastiveTraining(CommonTraining):
    """Training settings of the contrastive objective."""

    pooling: Literal["mean", "last", "eos"] = "mean"
    """contrastive: the embedding of a text. mean: of its tokens' last hidden states; last: of its
    last token; eos: of an end token that is appended to it."""

    scale: PositiveFloat = 20.0
    """contrastive: factor on the cosine similarities, 1 / temperature."""

    symmetric: bool = False
    """contrastive: each positive also has to find its anchor; the loss is the mean of both."""

    bidirectional: bool = False
    """contrastive: tokens of a decoder-only model attend to later tokens, too."""

    negatives: NonNegativeInt = 0
    """contrastive: number of a row's negatives that are read."""

    @property
    def texts_per_row(self) -> int:
        """Number of texts in a contrastive row: anchor, positive and negatives."""
        return 2 + self.negatives
