"""Logging to TensorBoard, which `--tensorboard` asks for."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from config.errors import UserError
from run.records.metrics_jsonl import SAMPLES, Sample


class TensorBoardLog:
    """Writes TensorBoard's events."""

    def __init__(self, directory: Path, first_step: int) -> None:
        """
        Args:
            directory: to write them into.
            first_step: steps that are done; TensorBoard skips events of later steps, which the run
                now repeats.

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

    def log(self, row: Mapping[str, float], samples: Sequence[Sample] = ()) -> None:
        """Log the values of one step, and samples as a table."""
        step = int(row["step"])
        for name, value in row.items():
            if name not in ("step", "time"):
                self._writer.add_scalar(name, value, step)
        if samples:
            self._writer.add_text(SAMPLES, _table(samples), step)

    def close(self, failed: bool = False) -> None:
        """Write what is left."""
        self._writer.close()


def _table(samples: Sequence[Sample]) -> str:
    """Samples in Markdown, a row for each."""
    names = list(samples[0])
    rows = [names, ["---"] * len(names), *([_cell(s[name]) for name in names] for s in samples)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(text: str) -> str:
    """A text as it is: no Markdown, and on one line."""
    return html.escape(text).replace("|", "&#124;").replace("\n", "<br>")
