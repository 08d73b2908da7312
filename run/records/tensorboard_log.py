"""TensorBoard logger (`--tensorboard`)."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from config.errors import UserError
from run.records.metrics_jsonl import SAMPLES, PredictionSample


class TensorBoardLog:
    """Logger that writes TensorBoard event files."""

    def __init__(self, directory: Path, first_step: int) -> None:
        """Open an event file.

        Args:
            directory: folder for event files.
            first_step: number of steps done; TensorBoard then hides events of later steps.

        Raises:
            UserError: tensorboardX is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise UserError(
                "--tensorboard needs the package tensorboardX: pip install tensorboardX"
            ) from None
        self._writer = SummaryWriter(str(directory), purge_step=first_step + 1)

    def log(self, metrics: Mapping[str, float], samples: Sequence[PredictionSample] = ()) -> None:
        """Log the metrics of an optimizer step, and predictions as a table."""
        step = int(metrics["step"])
        for name, value in metrics.items():
            if name not in ("step", "time"):
                self._writer.add_scalar(name, value, step)
        if samples:
            self._writer.add_text(SAMPLES, _prediction_table(samples), step)

    def close(self, failed: bool = False) -> None:
        """Flush and close the TensorBoard event file."""
        self._writer.close()


def _prediction_table(samples: Sequence[PredictionSample]) -> str:
    """Format predictions of an evaluation as a Markdown table."""
    names = list(samples[0])
    rows = [
        names,
        ["---"] * len(names),
        *([_escape_cell(s[name]) for name in names] for s in samples),
    ]
    return "\n".join(f"| {' | '.join(metrics)} |" for metrics in rows)


def _escape_cell(text: str) -> str:
    """Escape a text for a cell of a Markdown table."""
    return html.escape(text).replace("|", "&#124;").replace("\n", "<br>")
