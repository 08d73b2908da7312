"""Logging to TensorBoard, which `--tensorboard` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from config.errors import UserError

FOLDER = "tensorboard"


class TensorBoardLog:
    """Writes events into `tensorboard/` of the run directory."""

    def __init__(self, directory: Path, first_step: int) -> None:
        """
        Args:
            directory: of the run.
            first_step: steps that are done; TensorBoard passes over events of later ones, which a
                run left that is now continued from before them.

        Raises:
            UserError: tensorboardX is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise UserError(
                "--tensorboard needs the package tensorboardX: pip install tensorboardX"
            ) from None
        self._writer = SummaryWriter(str(directory / FOLDER), purge_step=first_step + 1)

    def log(self, row: Mapping[str, float]) -> None:
        """Log the values of one step."""
        step = int(row["step"])
        for name, value in row.items():
            if name not in ("step", "time"):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
