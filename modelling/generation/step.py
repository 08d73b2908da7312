"""The beginning and end of a generation step."""

from __future__ import annotations

from collections.abc import Sequence

import popxl
from config.sections import RunConfig
from modelling.layers import Embeddings, LMHeadLoss
from popxl import Tensor
from popxl_addons import Module


class Step(Module):
    """From the token at one position to the logits of the next. Subclasses add their layers."""

    def __init__(
        self, config: RunConfig, head: LMHeadLoss, embeddings: Embeddings | None = None
    ) -> None:
        """Args: `embeddings`: of the words; default: as they are in the table."""
        super().__init__()
        self.embeddings = embeddings or Embeddings(config)
        self.head = head

    def build(
        self,
        position: Tensor,
        words: Tensor,
        caches: Sequence[Tensor] = (),
        fixed: Sequence[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """words: int32 (batch, 1) -> float32 logits (batch, part of the vocabulary), new caches.

        Args:
            position: of the words, int32 scalar.
            caches: of the positions before, see `Start`.
            fixed: what is the same at all positions, see `bind_step`.
        """
        with popxl.plan.part("embeddings/token"):
            x = self.embeddings(words)
        x, *caches = self.through(x, position, caches, fixed)
        with popxl.plan.part("head/token"):
            table = self.embeddings.tokens.get("weight") if self.head.tied else None
            return self.head.next_logits(x, table), *caches

    def through(
        self, x: Tensor, position: Tensor, caches: Sequence[Tensor], fixed: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """The layers: (batch, 1, hidden) -> the same shape, and the caches with this position."""
        raise NotImplementedError
