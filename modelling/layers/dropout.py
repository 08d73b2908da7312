"""Dropout, and the seeds it needs."""

from __future__ import annotations

from dataclasses import dataclass

from config.model import AnyModel
from popxl import Tensor, ops


@dataclass(frozen=True)
class Dropout:
    """Dropout with one probability, or none.

    A mask is a function of its seed and shape alone, so every use needs a seed of its own.

    Attributes:
        probability: of an element to become 0; with 0 no seeds are needed.
    """

    probability: float = 0.0

    @classmethod
    def from_model(cls, model: AnyModel, probability: float | None = None) -> Dropout:
        """The dropout of a model, or one of its others: none for evaluation."""
        chosen = model.dropout_prob if probability is None else probability
        return cls(0.0 if model.eval else chosen)

    @property
    def active(self) -> bool:
        return self.probability > 0

    def __call__(self, x: Tensor, seed: Tensor | None) -> Tensor:
        """Zero elements of `x` and scale up the others.

        Raises:
            ValueError: a seed is needed and missing.
        """
        return ops.dropout(x, self._needed(seed), self.probability) if self.active else x

    def arguments(self, seed: Tensor | None) -> tuple[Tensor | None, float]:
        """Seed and probability, for an op with dropout inside. Raises ValueError as a call."""
        return (self._needed(seed) if self.active else None), self.probability

    def _needed(self, seed: Tensor | None) -> Tensor:
        if seed is None:
            raise ValueError(
                f"dropout with probability {self.probability} needs a seed: pass a uint32 tensor "
                "of shape (2,), or build the model for evaluation"
            )
        return seed


NO_DROPOUT = Dropout()
