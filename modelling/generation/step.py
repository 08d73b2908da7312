"""The beginning and end of a generation step."""

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

    def __init__(
        self, config: RunConfig, head: LMHeadLoss, embeddings: Embeddings | None = None
    ) -> None:
        """Args: `embeddings`: of the words; default: as they are in the table."""
        super().__init__()
        self.embeddings = embeddings or Embeddings(config)
        self.head = head

    def embedded(self, words: Tensor) -> Tensor:
        """words: int32 (batch, 1) -> (batch, 1, hidden)."""
        with popxl.plan.part("embeddings/token"):
            return self.embeddings(words)

    def logits(self, x: Tensor) -> Tensor:
        """x: (batch, 1, hidden) -> float32 (batch, part of the vocabulary)."""
        with popxl.plan.part("head/token"):
            table = self.embeddings.tokens.get("weight") if self.head.tied else None
            return self.head.next_logits(x, table)
