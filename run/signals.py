"""Ending a run at its next step instead of in the middle of one."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

import popdist
from terminal.interrupts import SIGNALS, TWICE


class StopSignal:
    """Turns the first of `SIGNALS`, such as SIGTERM or SIGUSR1 (Slurm's warning of a time limit),
    into a flag to look at between steps. Processes agree there on whatever else ends or saves the
    run.

    with StopSignal() as stop:
        for step in range(steps):
            train(step)
            if stop.poll():
                save()
                break

    A second signal ends the program at once, unless it is the same signal again within `TWICE`
    seconds, as launchers send it. Outside the main thread, where Python delivers no signals, the
    flag stays down.
    """

    def __init__(self) -> None:
        self._received: str | None = None
        self._since = 0.0  # seconds
        self._agreed: str | None = None
        self.finished = self.save = False
        self._previous: dict[signal.Signals, Any] = {}

    def poll(self, finished: bool = False, save: bool = False) -> bool:
        """Whether a signal asked any process for the end. All of them look at the same time.

        Args:
            finished: this process finds that the training is over; `self.finished` then says
                whether any does.
            save: this process finds that it is time to save; so `self.save`.
        """
        received, ends, saves = zip(*popdist.gather([self._received, finished, save]), strict=True)
        # Signals that only this process has received since do not count: the others do not know of
        # them.
        self._agreed = next((name for name in received if name is not None), None)
        self.finished, self.save = any(ends), any(saves)
        return self._agreed is not None

    @property
    def received(self) -> str | None:
        """The signal that this process got, of which the others may not know yet."""
        return self._received

    @property
    def requested(self) -> bool:
        """Whether a signal asked for the end when all looked last."""
        return self._agreed is not None

    @property
    def name(self) -> str | None:
        """The signal that did, such as "SIGTERM"."""
        return self._agreed

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is signal.SIG_IGN:
                    continue  # as nohup ignores SIGHUP
                # None stands for a handler that was not set from Python and cannot be set again.
                self._previous[number] = signal.signal(number, self._receive) or signal.SIG_DFL
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if self._received is None:
            self._received, self._since = name, now
        elif name != self._received or now - self._since >= TWICE:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)
