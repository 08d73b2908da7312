"""Axis order of activations: batch first or sequence first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from config.sections import RunConfig
from popxl import Tensor


@dataclass(frozen=True)
class ActivationLayout:
    """Batch-first or sequence-first activations.

    They are (batch, length, hidden), or (length, batch, hidden) if `transposed`; a docstring that
    says (batch, length, hidden) means either. Token ids, labels, masks, heads and KV caches are
    always batch-first.
    """

    transposed: bool = False

    @classmethod
    def from_config(cls, config: RunConfig) -> Self:
        """Returns the layout set by `execution.transpose_batch_sequence`."""
        return cls(config.execution.transpose_batch_sequence)

    def shape(self, batch: int, length: int, hidden: int) -> tuple[int, int, int]:
        """Returns the shape of activations in this layout: the three sizes, in layout order."""
        return (length, batch, hidden) if self.transposed else (batch, length, hidden)

    def sequence_length(self, x: Tensor) -> int:
        """Returns the sequence length of activations in this layout."""
        return x.shape[0 if self.transposed else 1]

    def transpose_if_sequence_first(self, t: Tensor) -> Tensor:
        """Converts (batch, length, ...) to this layout; applied twice, it is the identity."""
        return t.transpose((1, 0, *range(2, t.rank))) if self.transposed else t
