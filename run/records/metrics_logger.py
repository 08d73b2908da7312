"""Metrics logger of a training run: metrics.jsonl, progress, W&B, TensorBoard and Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, Self

from config.objectives import OBJECTIVES
from config.sections import RunConfig
from files.atomic_writing import check_can_write_folder, wrap_write_errors, write_text_atomically
from files.formatting import format_name
from files.run_folder import RunFolder
from files.text_files import check_regular_file
from files.yaml_files import dump_yaml
from run.options import RunOptions
from run.records.loss_curve import PLOTTED_METRICS, draw_loss_curve
from run.records.metrics_jsonl import MetricsFile, PredictionSample, StepMetrics, read_metrics
from run.records.progress import TrainingProgress
from run.records.run_json import RunSession, append_session
from run.records.throughput import MfuInputs, Throughput, throughput_metrics
from terminal.screen import say


class OneWarningPerLogger:
    """Turns exceptions of metric loggers into warnings, one for each logger."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    @contextmanager
    def warn_on_error(self, name: str) -> Iterator[None]:
        """A context that turns an exception into a warning, so that training continues."""
        try:
            yield
        except Exception as error:  # of the disk, W&B or Matplotlib
            if name not in self._failing:
                self._failing.add(name)
                reason = " ".join(str(error).split()) or type(error).__name__
                say(
                    f"warning: {name} is not written, the run continues: {format_name(reason, 200)}"
                )


class MetricSink(Protocol):
    """Interface of a logger that passes metrics to another tool, such as TensorBoard."""

    def log(self, metrics: StepMetrics, samples: Sequence[PredictionSample] = ()) -> None:
        """Log the metrics of an optimizer step."""
        ...

    def close(self, failed: bool = False) -> None:
        """Close the logger; `failed` is True if the run ended with an error."""
        ...


class MetricsLogger:
    """Logs every optimizer step to files, screen and tools such as TensorBoard; a context manager.

    with MetricsLogger(config, folder, RunOptions("tiny")) as records:
        records.log_step(1, loss=3.2, learning_rate=0.0)
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
        """Open the files in the run's folder, and the sinks that the options select.

        The files of a run that is resumed are continued; metrics after its first step are dropped.

        Raises:
            UserError: the folder cannot be written, or a sink cannot be used.
        """
        self._warn_once = OneWarningPerLogger()
        self._title = f"{options.name}: {config.training.global_batch_size} samples a step"
        self._session = RunSession(first_step, options.command, hardware)
        self._folder, self._config = folder, config
        self._metrics = self._create_files()
        self._logs: dict[str, MetricSink] = {}
        if options.wandb:
            from run.records.wandb_log import WandbLog

            self._logs["Weights & Biases"] = WandbLog(
                config, options.wandb_name, options.wandb_project, folder.path
            )
        if options.tensorboard:
            from run.records.tensorboard_log import TensorBoardLog

            self._logs["TensorBoard's log"] = TensorBoardLog(folder.tensorboard_folder, first_step)
        if options.metrics_port is not None:
            from run.records.prometheus_page import PrometheusPage

            self._logs["Prometheus's page"] = PrometheusPage(
                options.metrics_host, options.metrics_port
            )
        self._perplexity = OBJECTIVES[config.training.objective].metrics.get("perplexity")
        self._mfu_inputs = use or MfuInputs()
        self._throughput = Throughput(config.training.global_batch_size)
        self._progress = TrainingProgress(config.training.steps, self._throughput, first_step)

    def log_step(
        self,
        step: int,
        *,
        loss: float,
        learning_rate: float,
        tokens: float | None = None,
        samples: Sequence[PredictionSample] = (),
        **extra_metrics: float,
    ) -> None:
        """Log an optimizer step.

        Args:
            step: number of steps done, from 1.
            loss: mean over the loss tokens of the global batch.
            learning_rate: learning rate of the step.
            tokens: number of its tokens without padding; None: not counted.
            samples: predictions of an evaluation after the step.
            extra_metrics: further metrics, such as `grad_norm` or `skipped_steps`.
        """
        self._throughput.update(step)
        metrics = {"step": step, "loss": float(loss), "learning_rate": float(learning_rate)}
        if self._perplexity is not None:
            metrics["perplexity"] = self._perplexity({"loss": (float(loss), 1.0)})
        metrics |= {name: float(value) for name, value in extra_metrics.items()}
        metrics |= throughput_metrics(self._throughput, tokens, self._mfu_inputs)
        self._progress.update(metrics)
        self._log(metrics, samples)

    def log_save(self, step: int, save_metrics: StepMetrics) -> None:
        """Log metrics of a checkpoint save that completed after the last step.

        Args:
            save_metrics: metrics of `CheckpointManager.report_last_save`.
        """
        self._log({"step": step, "time": round(time.time(), 3)} | save_metrics)

    def _log(self, metrics: StepMetrics, samples: Sequence[PredictionSample] = ()) -> None:
        with self._warn_once.warn_on_error(self._folder.metrics_file.name):
            if not self._folder.path.is_dir():  # deleted meanwhile
                self._metrics = self._create_files()
            self._metrics.append(metrics, samples)
        for name, log in self._logs.items():
            with self._warn_once.warn_on_error(name):
                log.log(metrics, samples)

    def _create_files(self) -> MetricsFile:
        """Create the run folder with config.yml and run.json, and open metrics.jsonl."""
        folder = self._folder
        with wrap_write_errors("the run directory", folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            metrics = MetricsFile(folder.metrics_file, self._session.first_step)
            write_text_atomically(
                "the configuration", folder.config_file, dump_yaml(self._config.to_dict())
            )
            append_session(folder, self._session)
        return metrics

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        """Close all sinks and plot the loss curve, also after an error."""
        self._progress.close()
        with self._warn_once.warn_on_error("the loss curve"):
            steps_metrics = read_metrics(self._folder.metrics_file, PLOTTED_METRICS)
            if steps_metrics:
                draw_loss_curve(steps_metrics, self._folder.loss_curve_file, self._title)
        for name, log in self._logs.items():
            with self._warn_once.warn_on_error(name):
                log.close(failed=kind is not None)


def check_records(folder: RunFolder) -> None:
    """Raise UserError unless the records of a run, such as metrics, can be written to the folder.

    Reading a metrics file that is a pipe or device would never end.
    """
    check_can_write_folder("the run directory", folder.path)
    if folder.metrics_file.exists():
        check_regular_file(folder.metrics_file)
