"""What a step of generation begins and ends with."""

from __future__ import annotations

import popxl
from config.sections import RunConfig
from modelling.layers import Embeddings, LMHeadLoss
from popxl import Tensor
from popxl_addons import Module


class Step(Module):
    """From the token at one position to the logits of the next.

    Subclasses add their layers, and `build`, which calls `embedded`, the layers and `logits`.
    """

    def __init__(self, config: RunConfig, head: LMHeadLoss) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.head = head

    def embedded(self, words: Tensor) -> Tensor:
        """words: int32 (batch, 1) -> (batch, 1, hidden)."""
        with popxl.plan.part("embeddings/token"):
            return self.embeddings(words)

    def logits(self, x: Tensor) -> Tensor:
        """x: (batch, 1, hidden) -> float32 (batch, part of the vocabulary)."""
        with popxl.plan.part("head/token"):
            return self.head.next_logits(x)
