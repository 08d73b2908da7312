"""Counter of steps skipped because the loss or a gradient was not finite."""

from __future__ import annotations

from config.errors import UserError
from sessions.training import StepResult


class SkippedSteps:
    """Counts training steps skipped for non-finite values; detects too many consecutive ones.

    Attributes:
        total: number of skipped steps of the run, also before it was resumed.
        in_a_row: number of steps skipped since the last one that was not.
    """

    def __init__(self, max_in_a_row: int, total: int = 0) -> None:
        """Start counting at a new or resumed run.

        Args:
            max_in_a_row: maximum number of consecutive skipped steps.
            total: number of skipped steps before the run was resumed.
        """
        self.total, self.in_a_row = total, 0
        self._max_in_a_row = max_in_a_row
        self._last: StepResult | None = None

    def count_step(self, result: StepResult) -> None:
        """Count a training step, and whether it was skipped."""
        if result.skipped:
            self.total += 1
            self._last = result
        if not self.too_many_in_a_row:  # later steps of the same program run are ignored
            self.in_a_row = self.in_a_row + 1 if result.skipped else 0

    @property
    def too_many_in_a_row(self) -> bool:
        return self.in_a_row > self._max_in_a_row

    def make_error(self, saved_message: str) -> UserError:
        """Return the error to raise after too many consecutive skipped steps.

        Args:
            saved_message: message about the last saved state.
        """
        assert self._last is not None
        steps = "a step was" if self.in_a_row == 1 else f"{self.in_a_row} steps in a row were"
        return UserError(
            f"{steps} skipped, since loss or gradients are not finite (loss {self._last.loss:.4g}, "
            f"gradient norm {self._last.grad_norm:.4g}): {saved_message}; lower the learning "
            "rate or --loss_scaling, or name the op with POPXL_CHECK=inf"
        )
