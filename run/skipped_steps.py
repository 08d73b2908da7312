"""Steps that the devices skipped because loss or gradients were not finite."""

from __future__ import annotations

from config.errors import UserError
from sessions.training import StepResult


class SkippedSteps:
    """Counts skipped steps, and says when there are too many in a row.

    Attributes:
        total: of the whole run, those before it was last continued included.
        in_a_row: since the last step that was not skipped.
    """

    def __init__(self, most_in_a_row: int, total: int = 0) -> None:
        """
        Args:
            most_in_a_row: most skipped steps in a row that are allowed.
            total: count so far, of a run that is continued.
        """
        self.total, self.in_a_row = total, 0
        self._most = most_in_a_row
        self._last: StepResult | None = None

    def count(self, result: StepResult) -> None:
        """Take a step into account."""
        if result.skipped:
            self.total += 1
            self._last = result
        if not self.too_many:  # steps that a run did after too many were skipped change nothing
            self.in_a_row = self.in_a_row + 1 if result.skipped else 0

    @property
    def too_many(self) -> bool:
        return self.in_a_row > self._most

    def error(self, kept: str) -> UserError:
        """The error to raise when there are too many.

        Args:
            kept: where the last good state is.
        """
        assert self._last is not None
        steps = "a step was" if self.in_a_row == 1 else f"{self.in_a_row} steps in a row were"
        return UserError(
            f"{steps} skipped, since loss or gradients are not finite (loss {self._last.loss:.4g}, "
            f"gradient norm {self._last.grad_norm:.4g}): {kept}; lower the learning rate or "
            "--loss_scaling, or name the op with POPXL_CHECK=inf"
        )
