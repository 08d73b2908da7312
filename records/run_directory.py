"""The directory of a run: config.yml, metrics.jsonl and loss_curve.png."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import yaml

from config.errors import UserError
from config.sections import RunConfig
from records.loss_curve import draw_loss_curve
from records.metrics import MetricsFile, read_metrics

CONFIG, METRICS, LOSS_CURVE = "config.yml", "metrics.jsonl", "loss_curve.png"


class RunDirectory:
    """Holds the records of one run. A directory that an earlier run left is continued."""

    def __init__(self, path: Path, config: RunConfig, first_step: int = 0) -> None:
        """Create the directory and write config.yml, which `--config` reads back.

        Args:
            path: the directory; missing parents are created.
            config: the run's configuration.
            first_step: the step the run starts at; metrics from it on are dropped.

        Raises:
            UserError: if nothing can be written there.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / CONFIG).write_text(
                yaml.safe_dump(config.to_dict(), sort_keys=False), encoding="utf-8"
            )
            self._metrics = MetricsFile(path / METRICS, first_step)
        except OSError as error:
            raise UserError(f"cannot write the run directory {path}: {error.strerror}") from error

    def log(self, row: Mapping[str, float]) -> None:
        """Append one step to metrics.jsonl."""
        self._metrics.append(row)

    def draw(self, title: str) -> None:
        """Draw loss_curve.png from metrics.jsonl, if that holds any step."""
        rows = read_metrics(self.path / METRICS)
        if rows:
            draw_loss_curve(rows, self.path / LOSS_CURVE, title)


def choose_path(given: str | None, save: str | None, preset: str) -> Path:
    """The run directory: the one given, else where checkpoints go, else a new one under runs/."""
    if given or save:
        return Path(given or save or "")
    return Path("runs") / f"{Path(preset).stem}-{datetime.now():%Y%m%d-%H%M%S}"
