"""Reporting a training run: each step goes to the run directory, the screen and W&B at once."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, Self

from config.sections import RunConfig
from records.lenient import Lenient
from records.pace import Machine, pace
from records.progress import Progress
from records.run_directory import RunDirectory
from records.tensorboard_log import TensorBoardLog
from records.throughput import Throughput
from records.wandb_log import WandbLog


class ReportOptions(Protocol):
    """What else than the run directory a run is reported to; see `training.options`."""

    @property
    def name(self) -> str: ...

    @property
    def wandb(self) -> bool: ...

    @property
    def wandb_name(self) -> str | None: ...

    @property
    def tensorboard(self) -> bool: ...


class Silence:
    """A report that nobody sees: that of all but the first of several processes."""

    def step(self, step: int, **values: object) -> None:
        """Report nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class Report:
    """Use it as a context, and call `step` after every optimizer step:

    with Report(config, path, RunOptions("tiny")) as report:
        report.step(0, loss=3.2, learning_rate=0.0)
    """

    def __init__(
        self,
        config: RunConfig,
        path: Path,
        options: ReportOptions,
        first_step: int = 0,
        machine: Machine | None = None,
    ) -> None:
        """Open the run directory `path`, and what else the options ask for.

        Raises:
            UserError: if the directory cannot be written, or what is asked for not be used.
        """
        self._lenient = Lenient()
        self._title = f"{options.name}: {config.training.global_batch_size} samples a step"
        self._directory = RunDirectory(path, config, first_step)
        self._wandb = WandbLog(config, options.wandb_name, path) if options.wandb else None
        self._tensorboard = TensorBoardLog(path, first_step) if options.tensorboard else None
        self._machine = machine or Machine()
        self._throughput = Throughput(config.training.global_batch_size)
        self._progress = Progress(config.training.steps, self._throughput, first_step)

    def step(
        self,
        step: int,
        *,
        loss: float,
        learning_rate: float,
        tokens: float | None = None,
        **more: float,
    ) -> None:
        """Report a step that is done.

        Args:
            step: its number, from 0.
            loss: mean over the target tokens of the global batch.
            learning_rate: the rate it used.
            tokens: of its samples, without padding.
            more: further values to record, such as `gradient_norm` or `skipped_steps`.
        """
        self._throughput.update(step + 1)
        row = {"step": step, "loss": float(loss), "learning_rate": float(learning_rate)}
        row |= {name: float(value) for name, value in more.items()}
        row |= pace(self._throughput, tokens, self._machine)
        with self._lenient.unless_it_fails("metrics.jsonl"):
            self._directory.log(row)
        self._progress.update(row)
        if self._wandb:
            with self._lenient.unless_it_fails("Weights & Biases"):
                self._wandb.log(row)
        if self._tensorboard:
            with self._lenient.unless_it_fails("TensorBoard's log"):
                self._tensorboard.log(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        """Close everything; the loss curve is drawn after a failure too."""
        self._progress.close()
        with self._lenient.unless_it_fails("the loss curve"):
            self._directory.draw(self._title)
        if self._wandb:
            with self._lenient.unless_it_fails("Weights & Biases"):
                self._wandb.close(failed=kind is not None)
        if self._tensorboard:
            with self._lenient.unless_it_fails("TensorBoard's log"):
                self._tensorboard.close()
