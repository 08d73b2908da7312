"""The records of a training run: each step goes to its directory, the screen and W&B at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, Self

from config.metrics import OBJECTIVES
from config.sections import RunConfig
from files.atomic_writing import check_can_write_folder, write_errors, write_text
from files.formatting import format_name
from files.run_folder import RunFolder
from files.text_files import check_regular
from files.yaml_files import dump_yaml
from run.options import RunOptions
from run.records.loss_curve import DRAWN, draw_loss_curve
from run.records.metrics_jsonl import MetricsFile, Row, Sample, read_metrics
from run.records.progress import TrainingProgress
from run.records.prometheus_page import PrometheusPage
from run.records.run_json import RunSession, append_session
from run.records.tensorboard_log import TensorBoardLog
from run.records.throughput import MfuInputs, Throughput, throughput_metrics
from run.records.wandb_log import WandbLog
from terminal.screen import say


class WarnOnce:
    """Lets a run continue without a record that cannot be written, and says so once for each."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    @contextmanager
    def warn_on_error(self, what: str) -> Iterator[None]:
        """Turn a failure inside the context into a warning: no run ends for a record."""
        try:
            yield
        except Exception as error:  # whatever the disk, Weights & Biases or Matplotlib raise
            if what not in self._failing:
                self._failing.add(what)
                reason = " ".join(str(error).split()) or type(error).__name__
                say(
                    f"warning: {what} is not written, the run continues: {format_name(reason, 200)}"
                )


class MetricSink(Protocol):
    """Where values go besides the run's directory."""

    def log(self, row: Row, samples: Sequence[Sample] = ()) -> None:
        """Take the values of a step."""
        ...

    def close(self, failed: bool = False) -> None:
        """End it; `failed`: the run ends with an error."""
        ...


class MetricsLogger:
    """Use it as a context, and call `step` after every optimizer step:

    with MetricsLogger(config, folder, RunOptions("tiny")) as records:
        records.step(1, loss=3.2, learning_rate=0.0)
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        options: RunOptions,
        first_step: int = 0,
        use: MfuInputs | None = None,
        hardware: str = "",
    ) -> None:
        """Open the files in the run's folder, and the other logs that the options ask for.

        A folder that an earlier run left is continued: metrics after its first step are dropped.

        Raises:
            UserError: if the directory cannot be written, or one of the other logs cannot be used.
        """
        self._lenient = WarnOnce()
        self._title = f"{options.name}: {config.training.global_batch_size} samples a step"
        self._session = RunSession(first_step, options.command, hardware)
        self._folder, self._config = folder, config
        self._metrics = self._begin()
        self._logs: dict[str, MetricSink] = {}
        if options.wandb:
            self._logs["Weights & Biases"] = WandbLog(
                config, options.wandb_name, options.wandb_project, folder.path
            )
        if options.tensorboard:
            self._logs["TensorBoard's log"] = TensorBoardLog(folder.tensorboard, first_step)
        if options.metrics_port is not None:
            self._logs["Prometheus's page"] = PrometheusPage(
                options.metrics_host, options.metrics_port
            )
        self._perplexity = OBJECTIVES[config.training.objective].get("perplexity")
        self._use = use or MfuInputs()
        self._throughput = Throughput(config.training.global_batch_size)
        self._progress = TrainingProgress(config.training.steps, self._throughput, first_step)

    def step(
        self,
        step: int,
        *,
        loss: float,
        learning_rate: float,
        tokens: float | None = None,
        samples: Sequence[Sample] = (),
        **more: float,
    ) -> None:
        """Report a step that is done.

        Args:
            step: its number, from 1: how many are done.
            loss: mean over the target tokens of the global batch.
            learning_rate: the rate it used.
            tokens: of its samples, without padding.
            samples: what an evaluation after it wrote.
            more: further values to record, such as `grad_norm` or `skipped_steps`.
        """
        self._throughput.update(step)
        row = {"step": step, "loss": float(loss), "learning_rate": float(learning_rate)}
        if self._perplexity is not None:
            row["perplexity"] = self._perplexity({"loss": (float(loss), 1.0)})
        row |= {name: float(value) for name, value in more.items()}
        row |= throughput_metrics(self._throughput, tokens, self._use)
        self._progress.update(row)
        self._log(row, samples)

    def saved(self, step: int, facts: Row) -> None:
        """Report the save after the last step.

        Args:
            facts: what `run.checkpoint_manager` knows of it.
        """
        self._log({"step": step, "time": round(time.time(), 3)} | facts)

    def _log(self, row: Row, samples: Sequence[Sample] = ()) -> None:
        with self._lenient.warn_on_error(self._folder.metrics.name):
            if not self._folder.path.is_dir():  # somebody has deleted it
                self._metrics = self._begin()
            self._metrics.append(row, samples)
        for name, log in self._logs.items():
            with self._lenient.warn_on_error(name):
                log.log(row, samples)

    def _begin(self) -> MetricsFile:
        """Make the folder, with config.yml and run.json."""
        folder = self._folder
        with write_errors("the run directory", folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            metrics = MetricsFile(folder.metrics, self._session.first_step)
            write_text("the configuration", folder.config, dump_yaml(self._config.to_dict()))
            append_session(folder, self._session)
        return metrics

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        """Close everything; the loss curve is drawn after a failure too."""
        self._progress.close()
        with self._lenient.warn_on_error("the loss curve"):
            rows = read_metrics(self._folder.metrics, DRAWN)
            if rows:
                draw_loss_curve(rows, self._folder.loss_curve, self._title)
        for name, log in self._logs.items():
            with self._lenient.warn_on_error(name):
                log.close(failed=kind is not None)


def check_records(folder: RunFolder) -> None:
    """Raise UserError unless a run's records can be written into the folder.

    A metrics file that is a pipe or a device would be read forever.
    """
    check_can_write_folder("the run directory", folder.path)
    if folder.metrics.exists():
        check_regular(folder.metrics)
