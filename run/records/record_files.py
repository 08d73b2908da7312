"""The records of a run as files: config.yml, run.json, metrics.jsonl and loss_curve.png."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from config.sections import RunConfig
from files.run_folder import RunFolder
from files.text import check_regular
from files.writing import check_folder, write_text, writing
from files.yaml_files import yaml_text
from run.records.loss_curve import DRAWN, draw_loss_curve
from run.records.metrics import MetricsFile, Sample, read_metrics
from run.records.run_json import Session, add_session


class RecordFiles:
    """Writes the records of one run. A folder that an earlier run left is continued."""

    def __init__(self, folder: RunFolder, config: RunConfig, session: Session) -> None:
        """Create the folder and write config.yml.

        Args:
            folder: of the run; missing parents are created.
            config: the run's configuration.
            session: this one; metrics of steps after its first are dropped.

        Raises:
            UserError: if nothing can be written there.
        """
        self._folder, self._config, self._session = folder, config, session
        self._metrics = self._begun()

    def _begun(self) -> MetricsFile:
        folder = self._folder
        with writing("the run directory", folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            metrics = MetricsFile(folder.metrics, self._session.first_step)
            write_text("the configuration", folder.config, yaml_text(self._config.to_dict()))
            add_session(folder, self._session)
        return metrics

    def log(self, row: Mapping[str, float], samples: Sequence[Sample] = ()) -> None:
        """Append one step to metrics.jsonl, in a new folder if somebody has deleted it.

        Raises:
            WriteError: it cannot be written.
        """
        if not self._folder.path.is_dir():
            self._metrics = self._begun()
        self._metrics.append(row, samples)

    def draw(self, title: str) -> None:
        """Draw loss_curve.png from metrics.jsonl, if that holds any step.

        Raises:
            OSError, WriteError: the one cannot be read, or the other not be written.
        """
        rows = read_metrics(self._folder.metrics, DRAWN)
        if rows:
            draw_loss_curve(rows, self._folder.loss_curve, title)


def check_records(folder: RunFolder) -> None:
    """Raise UserError unless a run's records can be written into the folder.

    A metrics file that is a pipe or a device would be read forever.
    """
    check_folder("the run directory", folder.path)
    if folder.metrics.exists():
        check_regular(folder.metrics)
