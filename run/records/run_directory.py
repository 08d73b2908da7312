"""The directory of a run: config.yml, run.json, metrics.jsonl and loss_curve.png."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from config.sections import RunConfig
from files.text import check_regular
from files.writing import check_folder, write_text, writing
from files.yaml_files import yaml_text
from run.records.loss_curve import draw_loss_curve
from run.records.metrics import MetricsFile, Sample, read_metrics
from run.records.run_json import Session, add_session

CONFIG, METRICS, LOSS_CURVE = "config.yml", "metrics.jsonl", "loss_curve.png"
VALIDATION_FILE = "validation.json"
"""What run_validation.py writes next to them."""


class RunDirectory:
    """Holds the records of one run. A directory that an earlier run left is continued."""

    def __init__(self, path: Path, config: RunConfig, session: Session) -> None:
        """Create the directory and write config.yml, which `--config` reads back.

        Args:
            path: the directory; missing parents are created.
            config: the run's configuration.
            session: this one; metrics of steps after its first are dropped.

        Raises:
            UserError: if nothing can be written there.
        """
        self.path = path
        with writing("the run directory", path):
            path.mkdir(parents=True, exist_ok=True)
            self._metrics = MetricsFile(path / METRICS, session.first_step)
            write_text("the configuration", path / CONFIG, yaml_text(config.to_dict()))
            add_session(path, session)

    def log(self, row: Mapping[str, float], samples: Sequence[Sample] = ()) -> None:
        """Append one step to metrics.jsonl. Raises WriteError if it cannot be."""
        self._metrics.append(row, samples)

    def draw(self, title: str) -> None:
        """Draw loss_curve.png from metrics.jsonl, if that holds any step.

        Raises:
            OSError, WriteError: the one cannot be read, or the other not be written.
        """
        rows = read_metrics(self.path / METRICS)
        if rows:
            draw_loss_curve(rows, self.path / LOSS_CURVE, title)


def check_path(path: Path) -> None:
    """Raise UserError unless a run's records can be written into the directory.

    A metrics file that is a pipe or a device would be read forever.
    """
    check_folder("the run directory", path)
    if (path / METRICS).exists():
        check_regular(path / METRICS)


def choose_path(given: str | None, save: str | None, preset: str) -> Path:
    """The run directory: the one given, else where checkpoints go, else a new one under runs/."""
    if given or save:
        return Path(given or save or "")
    return Path("runs") / f"{Path(preset).stem}-{datetime.now():%Y%m%d-%H%M%S}"
