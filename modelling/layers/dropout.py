"""Dropout, driven by explicit seeds."""

from __future__ import annotations

from dataclasses import dataclass

from config.model import ModelSection
from popxl import Tensor, ops


@dataclass(frozen=True)
class Dropout:
    """Dropout with a fixed probability.

    A mask is a function of its seed and shape alone, so every use needs a seed of its own.

    Attributes:
        probability: of an element to become 0; with 0 no seeds are needed.
    """

    probability: float = 0.0

    @classmethod
    def from_model_config(
        cls, model_config: ModelSection, probability: float | None = None
    ) -> Dropout:
        """Returns dropout with the model's `dropout_prob` or `probability`; 0 in evaluation."""
        p = model_config.dropout_prob if probability is None else probability
        return cls(0.0 if model_config.eval else p)

    @property
    def is_active(self) -> bool:
        """True if the probability is above 0."""
        return self.probability > 0

    def __call__(self, x: Tensor, seed: Tensor | None) -> Tensor:
        """Applies dropout to `x`: any shape -> the same shape.

        Args:
            seed: uint32 (2,); None only if dropout is not active.

        Raises:
            ValueError: a seed is needed and missing.
        """
        return ops.dropout(x, self._check_seed(seed), self.probability) if self.is_active else x

    def op_arguments(self, seed: Tensor | None) -> tuple[Tensor | None, float]:
        """Returns seed and probability as arguments of an op with built-in dropout.

        Raises:
            ValueError: a seed is needed and missing.
        """
        return (self._check_seed(seed) if self.is_active else None), self.probability

    def _check_seed(self, seed: Tensor | None) -> Tensor:
        if seed is None:
            raise ValueError(
                f"dropout with probability {self.probability} needs a seed: pass a uint32 tensor "
                "of shape (2,), or build the model for evaluation"
            )
        return seed


NO_DROPOUT = Dropout()
