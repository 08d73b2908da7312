"""Profiler of training steps (`--profile`) during a run.

After one warm-up run of the program come N normal runs, N runs in which the host waits for each
piece of work, and N runs with JAX's profiler. All of them train, with unchanged results. A run
without --save and --save-hf ends after them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

from config.errors import ConfigError
from config.sections import RunConfig
from files.atomic_writing import write_text_atomically
from files.run_folder import RunFolder
from planning.hardware.announce_devices import describe_devices
from popxl import hardware
from popxl.timing import Timing
from run.options import RunOptions
from run.records.metrics_logger import OneWarningPerLogger
from sessions.training import TrainingSession
from terminal.screen import say

WARM_UP, STAGES = 1, 3


class Profiler:
    """Profiles several runs of the training program (`--profile`); a context manager.

    Call `before_run` before every run.
    """

    def __init__(self, runs: int, model: TrainingSession, title: str, folder: RunFolder) -> None:
        """Plan the measurements, which start after the first step.

        Args:
            runs: of the program, for each of the three measurements; 0: do not measure.
            title: what is measured.
            folder: of the run.
        """
        self._model, self._folder = model, folder
        self._title = f"Time by phase of {title} on {describe_devices(model.config)}"
        self._overlapped = self._serialized = Timing()
        self._warn_once = OneWarningPerLogger()
        self._stage_context = ExitStack()
        self._next, self._num_runs = 0, runs
        starts = self._time_overlapped, self._time_serialized, self._trace, self._write_results
        self._stage_starts: dict[int, Callable[[], None]] = {}
        if runs:
            self._stage_starts = {WARM_UP + i * runs: start for i, start in enumerate(starts)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._stage_starts:
            self._write_results()

    def before_run(self) -> None:
        """Start or end a measurement if it is due before the next run of the program."""
        start = self._stage_starts.pop(self._next, None)
        self._next += 1
        if start is not None:
            self._close_stage()
            start()

    def _time_overlapped(self) -> None:
        self._overlapped = self._stage_context.enter_context(self._model.session.timing())

    def _time_serialized(self) -> None:
        self._serialized = self._stage_context.enter_context(
            self._model.session.timing(synchronize=True)
        )

    def _trace(self) -> None:
        with self._warn_once.warn_on_error("the trace"):
            self._stage_context.enter_context(hardware.profile_trace(self._folder.profile_folder))
        self._stage_context.enter_context(
            self._model.session.timing()
        )  # names the phases in the trace

    def _write_results(self) -> None:
        """Write the table of time by phase if all measurements are complete."""
        self._stage_starts.clear()
        self._close_stage()
        if not (self._overlapped.num_runs and self._serialized.num_runs):
            say("the run ended before it was profiled")
            return
        from run.records.phase_table import format_phase_table

        table = format_phase_table(self._title, self._overlapped, self._serialized)
        with self._warn_once.warn_on_error("the table of phases"):
            write_text_atomically("the table of phases", self._folder.phase_table_file, table)
            name = self._folder.phase_table_file.name
            trace_folder = self._folder.profile_folder
            first_run = WARM_UP + 1
            last_run = WARM_UP + STAGES * self._num_runs
            say(
                f"profiled runs {first_run} to {last_run} of the program: "
                f"{self._num_runs} as they are, {self._num_runs} phase by phase, "
                f"{self._num_runs} with a trace; {trace_folder} has the trace, "
                f"and the time by phase in {name}"
            )

    def _close_stage(self) -> None:
        with self._warn_once.warn_on_error("the trace"):
            self._stage_context.close()


def runs_to_profile(config: RunConfig, options: RunOptions, first_step: int) -> int:
    """Return the number of program runs in each profiler measurement; 0 without --profile.

    Raises:
        ConfigError: too few steps are left.
    """
    if options.profile is None:
        return 0
    steps_left = config.training.steps - first_step
    steps_needed = _num_steps(options.profile, config)
    if steps_left < steps_needed:
        raise ConfigError(
            f"--profile {options.profile} takes {steps_needed} steps of training, but "
            f"{max(steps_left, 0)} are left: raise --steps, or profile fewer"
        )
    return _num_runs(options.profile, config)


def print_profile_plan(config: RunConfig, options: RunOptions, first_step: int) -> None:
    """Print that the training run ends after profiling; raises as `runs_to_profile` does."""
    if runs_to_profile(config, options, first_step) and _saves_nothing(config, options):
        say(
            f"--profile {options.profile} trains {config.training.steps - first_step} steps, and "
            "nothing is saved: --save DIR trains all of the run"
        )


def limit_steps_to_profile(config: RunConfig, options: RunOptions, first_step: int) -> RunConfig:
    """Return the config of a run that ends after profiling, if the run saves nothing."""
    if options.profile is None or not _saves_nothing(config, options):
        return config
    off = ("training.epochs", "eval.steps", "eval.patience", "checkpoint.keep_best")
    steps = first_step + _num_steps(options.profile, config)
    return config.with_values({"training.steps": steps, **dict.fromkeys(off)})


def _saves_nothing(config: RunConfig, options: RunOptions) -> bool:
    return config.checkpoint.save is None and options.save_hf is None


def _num_steps(steps: int, config: RunConfig) -> int:
    """Return the optimizer steps that a run takes to profile `steps` steps, warm-up included."""
    return (WARM_UP + STAGES * _num_runs(steps, config)) * config.execution.device_iterations


def _num_runs(steps: int, config: RunConfig) -> int:
    return -(-steps // config.execution.device_iterations)
