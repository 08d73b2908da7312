"""Early stopping: end training after `eval.patience` evaluations without improvement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EarlyStopping:
    """Counts consecutive evaluations without improvement.

    Attributes:
        patience: number of evaluations without improvement that end training; None: never.
        evals_since_best: number of evaluations since the last improvement.
    """

    patience: int | None
    evals_since_best: int = 0

    def update(self, improved: bool) -> None:
        """Count an evaluation that did or did not improve the metric."""
        self.evals_since_best = 0 if improved else self.evals_since_best + 1

    @property
    def should_stop(self) -> bool:
        return self.patience is not None and self.evals_since_best >= self.patience
