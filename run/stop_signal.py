"""Stop signals (SIGTERM and others), which end a run after the current step."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

import popdist
from terminal.interrupts import DUPLICATE_WINDOW, SIGNALS


class StopSignal:
    """Turns the first SIGTERM or similar signal into a flag that is polled between steps.

    `SIGNALS` lists the signals, such as SIGUSR1 (Slurm's warning of a time limit). Processes
    agree in `poll_all_processes` on the signal.

    with StopSignal() as stop:
        for step in range(steps):
            train(step)
            if stop.poll_all_processes():
                save()
                break

    A second signal ends the program at once, unless it is the same signal again within
    `DUPLICATE_WINDOW` seconds, as launchers send it. Outside the main thread, where Python delivers
    no signals, the flag stays down.

    Attributes:
        received: the signal that this process got, such as "SIGTERM", of which the others may not
            know yet.
        name: the signal that any process had got when all looked last.
        finished, save: whether any process found then that training is over, or time to save.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.name: str | None = None
        self._signal_time = 0.0  # seconds
        self.finished = self.save = False
        self._previous: dict[signal.Signals, Any] = {}

    def poll_all_processes(self, finished: bool = False, save: bool = False) -> bool:
        """Exchange the flag between processes; True if any of them received a signal. Collective.

        Args:
            finished, save: this process's flags.
        """
        received, ends, saves = zip(
            *popdist.all_gather_object([self.received, finished, save]), strict=True
        )
        # A signal that arrives after this exchange counts at the next one, on all processes.
        self.name = next((name for name in received if name is not None), None)
        self.finished, self.save = any(ends), any(saves)
        return self.name is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is signal.SIG_IGN:
                    continue  # ignored on purpose, as SIGHUP by nohup
                # None is a handler set outside of Python, which cannot be restored.
                self._previous[number] = signal.signal(number, self._receive) or signal.SIG_DFL
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if self.received is None:
            self.received, self._signal_time = name, now
        elif name != self.received or now - self._signal_time >= DUPLICATE_WINDOW:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)
