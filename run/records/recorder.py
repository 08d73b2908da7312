"""The records of a training run: each step goes to its directory, the screen and W&B at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from config.sections import RunConfig
from files.run_folder import RunFolder
from files.shown import shown_name
from run.options import RunOptions
from run.records.metrics import Sample
from run.records.pace import Throughput, Utilisation, pace
from run.records.progress import Progress
from run.records.record_files import RecordFiles
from run.records.run_json import Session
from run.records.tensorboard_log import TensorBoardLog
from run.records.wandb_log import WandbLog
from terminal.screen import say


class Lenient:
    """Lets a run continue without a record that cannot be written, and says so once for each."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    @contextmanager
    def best_effort(self, what: str) -> Iterator[None]:
        """Turn a failure inside the context into a warning: no run ends for a record."""
        try:
            yield
        except Exception as error:  # whatever the disk, Weights & Biases or Matplotlib raise
            if what not in self._failing:
                self._failing.add(what)
                reason = " ".join(str(error).split()) or type(error).__name__
                say(f"warning: {what} is not written, the run goes on: {shown_name(reason, 200)}")


class Silence:
    """A recorder that writes nothing: that of all but the first of several processes."""

    def step(self, step: int, **values: object) -> None:
        """Record nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class Recorder:
    """Use it as a context, and call `step` after every optimizer step:

    with Recorder(config, folder, RunOptions("tiny")) as records:
        records.step(1, loss=3.2, learning_rate=0.0)
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        options: RunOptions,
        first_step: int = 0,
        use: Utilisation | None = None,
        hardware: str = "",
    ) -> None:
        """Open the files in the run's folder, and the other logs that the options ask for.

        Raises:
            UserError: if the directory cannot be written, or one of the other logs cannot be used.
        """
        self._lenient = Lenient()
        self._title = f"{options.name}: {config.training.global_batch_size} samples a step"
        session = Session(first_step, options.command, hardware)
        self._folder, self._files = folder, RecordFiles(folder, config, session)
        self._wandb = WandbLog(config, options.wandb_name, folder.path) if options.wandb else None
        self._tensorboard = (
            TensorBoardLog(folder.tensorboard, first_step) if options.tensorboard else None
        )
        self._use = use or Utilisation()
        self._throughput = Throughput(config.training.global_batch_size)
        self._progress = Progress(config.training.steps, self._throughput, first_step)

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
            more: further values to record, such as `gradient_norm` or `skipped_steps`.
        """
        self._throughput.update(step)
        row = {"step": step, "loss": float(loss), "learning_rate": float(learning_rate)}
        row |= {name: float(value) for name, value in more.items()}
        row |= pace(self._throughput, tokens, self._use)
        with self._lenient.best_effort(self._folder.metrics.name):
            self._files.log(row, samples)
        self._progress.update(row)
        if self._wandb:
            with self._lenient.best_effort("Weights & Biases"):
                self._wandb.log(row, samples)
        if self._tensorboard:
            with self._lenient.best_effort("TensorBoard's log"):
                self._tensorboard.log(row, samples)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        """Close everything; the loss curve is drawn after a failure too."""
        self._progress.close()
        with self._lenient.best_effort("the loss curve"):
            self._files.draw(self._title)
        if self._wandb:
            with self._lenient.best_effort("Weights & Biases"):
                self._wandb.close(failed=kind is not None)
        if self._tensorboard:
            with self._lenient.best_effort("TensorBoard's log"):
                self._tensorboard.close()
