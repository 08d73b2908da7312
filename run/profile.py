"""`--profile`: what training steps spend their time on, measured while training goes on.

One run of the program warms up. Then come N ordinary runs, N in which the host waits for each piece
of work before the next, and N with JAX's profiler. All of them train, with the same bits as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

from config.errors import ConfigError
from config.sections import RunConfig
from files.run_folder import RunFolder
from files.writing import write_text
from machine.devices import described_devices
from popxl import hardware
from popxl.session import Timing
from run.records.phase_table import phase_table
from run.records.recorder import Lenient
from sessions.training import FineTuning
from terminal.screen import say

WARM_UP, STAGES = 1, 3


class Profile:
    """Use it as a context, and call `before_run` before every run of the program."""

    def __init__(self, runs: int, model: FineTuning, title: str, folder: RunFolder) -> None:
        """
        Args:
            runs: of the program, for each of the three measurements; 0: do not measure.
            title: what is measured.
            folder: of the run.
        """
        self._model, self._folder = model, folder
        self._title = f"Time by phase of {title} on {described_devices(model.config)}"
        self._running = self._apart = Timing()
        self._lenient = Lenient()
        self._stage = ExitStack()
        self._next = 0
        starts = self._time_as_it_runs, self._time_apart, self._trace, self._end
        self._starts: dict[int, Callable[[], None]] = {}
        if runs:
            self._starts = {WARM_UP + i * runs: start for i, start in enumerate(starts)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._starts:
            self._end()

    def before_run(self) -> None:
        """Begin and end measurements when it is time for that."""
        start = self._starts.pop(self._next, None)
        self._next += 1
        if start is not None:
            self._close_stage()
            start()

    def _time_as_it_runs(self) -> None:
        self._running = self._stage.enter_context(self._model.session.timing())

    def _time_apart(self) -> None:
        self._apart = self._stage.enter_context(self._model.session.timing(apart=True))

    def _trace(self) -> None:
        with self._lenient.best_effort("the trace"):
            self._stage.enter_context(hardware.profiled(self._folder.profile))
        self._stage.enter_context(self._model.session.timing())  # it names phases in the trace

    def _end(self) -> None:
        """Write the table, if there is something to write."""
        self._starts.clear()
        self._close_stage()
        if not (self._running.programs and self._apart.programs):
            say("the run ended before it was profiled")
            return
        table = phase_table(self._title, self._running, self._apart)
        with self._lenient.best_effort("the table of phases"):
            write_text("the table of phases", self._folder.phases, table)
            name, place = self._folder.phases.name, self._folder.profile
            say(f"a trace, and the time by phase in {name}, are in {place}")

    def _close_stage(self) -> None:
        with self._lenient.best_effort("the trace"):
            self._stage.close()


def profiled_runs(steps: int | None, config: RunConfig, first_step: int) -> int:
    """Runs of the program for each measurement; 0 if none is wanted.

    Raises:
        ConfigError: the run has too few steps left.
    """
    if steps is None:
        return 0
    each = config.execution.device_iterations
    runs, left = -(-steps // each), config.training.steps - first_step
    needed = (WARM_UP + STAGES * runs) * each
    if left < needed:
        raise ConfigError(
            f"--profile {steps} takes {needed} steps of training, but {max(left, 0)} are left: "
            "raise --steps, or profile fewer"
        )
    return runs
