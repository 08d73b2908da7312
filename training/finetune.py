"""The fine-tuning run: data, model, loop, records and checkpoints."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from checkpoints import check_is_free
from checkpoints.start import Start, starting_point
from config.cli import CommandLine
from config.errors import ConfigError, UserError
from config.screen import say
from config.sections import RunConfig
from data.loader import Loader
from huggingface.export import export
from modelling.compiling import compiled
from modelling.finetuning import FineTuning
from modelling.spec import family_of
from modelling.text import training_samples
from records.report import Report
from records.run_directory import choose_path
from training.epochs import with_steps
from training.saving import Checkpoints
from training.schedule import Schedule
from training.signals import StopSignal
from training.skipped_steps import SkippedSteps


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
        checkpoints = stack.enter_context(Checkpoints(config, model, loader, skipped))
        stack.enter_context(model)
        _train(config, model, loader, start, report, checkpoints, skipped, stop)
        if folder is not None and not stop.requested:
            export(config, model.tensors(optimizer=False), folder)
    if stop.requested:
        say(f"stopped by {stop.name} after step {checkpoints.step}")
        if folder is not None:
            say(f"nothing is in {folder}: huggingface.export can write a model from the checkpoint")
    say(f"records of the run are in {path}")


def _train(
    config: RunConfig,
    model: FineTuning,
    loader: Loader,
    start: Start,
    report: Report,
    checkpoints: Checkpoints,
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
