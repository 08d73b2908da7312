"""The fine-tuning run: data, model, loop, records and checkpoints."""

from __future__ import annotations

from contextlib import ExitStack
from importlib import metadata
from typing import Any

from config.cli import CommandLine
from config.errors import ConfigError, UserError
from config.sections import RunConfig
from data.loader import Loader
from finetuning import FineTuning
from modelling.spec import family_of
from training.checkpoint import CheckpointStore, check_is_free
from training.compiling import compiled
from training.epochs import with_steps
from training.export import export
from training.report import Report
from training.run_directory import choose_path
from training.samples import training_samples
from training.schedule import Schedule
from training.screen import say
from training.signals import StopSignal
from training.skipped_steps import SkippedSteps
from training.start import Start, starting_point


def finetune(line: CommandLine) -> None:
    """Train as the command line says.

    Raises:
        UserError: for anything a person can mend; nothing already saved is damaged.
    """
    config, folder = line.config, line.options.save_hf
    _check_iterations(config)
    if folder is not None:
        check_is_free(folder)
    loader = Loader(training_samples(config), config.training.global_batch_size, config.model.seed)
    config = with_steps(config, loader.samples)
    start = starting_point(config, family_of(config).weights(config))
    if start.data is not None:
        _continue(loader, start.data)
    model = compiled(FineTuning, config, line)
    model.write(start.tensors)
    say(f"starting from {start.source}")
    path = choose_path(line.options.run_dir, config.checkpoint.save, line.preset)
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        report = stack.enter_context(
            Report(config, path, line.preset, start.step, line.options.wandb,
                   line.options.wandb_name)
        )  # fmt: skip
        skipped = SkippedSteps(config.training.max_skipped_steps, start.skipped_steps)
        checkpoints = stack.enter_context(_Checkpoints(config, model, loader, skipped))
        stack.enter_context(model)
        _train(config, model, loader, start, report, checkpoints, skipped, stop)
        if folder is not None and not stop.requested:
            export(config, model.tensors(optimizer=False), folder)
    if stop.requested:
        say(f"stopped by {stop.name} after step {checkpoints.step}")
        if folder is not None:
            say(f"nothing is in {folder}: training.export can write a model from the checkpoint")
    say(f"records of the run are in {path}")


def _train(
    config: RunConfig,
    model: FineTuning,
    loader: Loader,
    start: Start,
    report: Report,
    checkpoints: _Checkpoints,
    skipped: SkippedSteps,
    stop: StopSignal,
) -> None:
    """The loop over optimizer steps, `device_iterations` at a time."""
    rate, iterations = Schedule.of(config.training), config.execution.device_iterations
    step = start.step
    while step < config.training.steps and not stop.requested:
        steps = range(step, step + iterations)
        rates = [rate(s) for s in steps]
        results = model.run([loader.next_batch() for _ in steps], rates, step)
        for s, learning_rate, result in zip(steps, rates, results, strict=True):
            skipped.count(result)
            report.step(
                s,
                loss=result.loss,
                learning_rate=learning_rate,
                gradient_norm=result.gradient_norm,
                skipped_steps=skipped.total,
            )
        step += iterations
        if skipped.too_many:
            break
        checkpoints.after(step)
    checkpoints.finish(step)
    if skipped.too_many:
        raise skipped.error(checkpoints.kept)


class _Checkpoints:
    """Saves now and then, and at the end. Does nothing without `checkpoint.save`."""

    def __init__(
        self, config: RunConfig, model: FineTuning, loader: Loader, skipped: SkippedSteps
    ) -> None:
        self._config, self._model, self._loader, self._skipped = config, model, loader, skipped
        settings = config.checkpoint
        self._store = CheckpointStore(settings.save, settings.to_keep) if settings.save else None
        self.step: int | None = None  # the last one saved

    def after(self, step: int) -> None:
        """Save if `checkpoint.steps` says so; the loop goes on meanwhile."""
        every = self._config.checkpoint.steps
        if every is not None and step % every < self._config.execution.device_iterations:
            self._save(step, wait=False)

    def finish(self, step: int) -> None:
        """Save the last step, if it is not saved yet."""
        if self.step != step:
            self._save(step, wait=True)

    def _save(self, step: int, wait: bool) -> None:
        if self._store is None:
            return
        tensors = self._model.tensors(self._config.checkpoint.optim_state)
        self._store.save(step, tensors, self._metadata(), wait)
        self.step = step
        if wait:
            say(f"saved step {step} in {self._config.checkpoint.save}")

    @property
    def kept(self) -> str:
        """Where the state of the last step is, for people."""
        if self._store is None:
            return "the state before is lost, since --save was not given"
        return f"the state before is saved as step {self.step} in {self._config.checkpoint.save}"

    def _metadata(self) -> dict[str, Any]:
        return {
            "data": self._loader.state(),
            "skipped_steps": self._skipped.total,
            "config": self._config.to_dict(),
            "versions": {name: metadata.version(name) for name in ("jax", "numpy", "popxl-xla")},
        }

    def __enter__(self) -> _Checkpoints:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._store is not None:
            self._store.close()


def _continue(loader: Loader, state: dict[str, Any]) -> None:
    try:
        loader.restore(state)
    except ValueError as error:
        raise UserError(str(error)) from error


def _check_iterations(config: RunConfig) -> None:
    iterations = config.execution.device_iterations
    if config.training.epochs is None and config.training.steps % iterations:
        raise ConfigError(
            f"training.steps {config.training.steps} must be divisible by "
            f"execution.device_iterations {iterations}"
        )
