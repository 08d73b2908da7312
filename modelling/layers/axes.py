"""The order of batch and sequence in activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from config.sections import RunConfig
from popxl import Tensor


@dataclass(frozen=True)
class ActivationLayout:
    """Activations are (batch, length, hidden), or (length, batch, hidden) if `transposed`.

    Where a docstring says (batch, length, hidden), it means either. Tokens, labels, masks, heads
    and the caches of generation always have the batch first.
    """

    transposed: bool = False

    @classmethod
    def from_config(cls, config: RunConfig) -> Self:
        """The order that `execution.transpose_batch_sequence` asks for."""
        return cls(config.execution.transpose_batch_sequence)

    def shape(self, batch: int, length: int, hidden: int) -> tuple[int, int, int]:
        """The shape of activations."""
        return (length, batch, hidden) if self.transposed else (batch, length, hidden)

    def length(self, x: Tensor) -> int:
        """How long the sequences of activations are."""
        return x.shape[0 if self.transposed else 1]

    def convert(self, t: Tensor) -> Tensor:
        """From (batch, length, ...) to the order of activations, or back."""
        return t.transpose((1, 0, *range(2, t.rank))) if self.transposed else t
