"""Watchdog that warns when a step, a save or the disk takes unusually long."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from signal import Signals
from typing import NamedTuple, Self

import popdist
from terminal.interrupts import signal_exit_code
from terminal.screen import is_first_process, say

REPEAT_SECONDS = 60.0  # between two warnings about the same work
SLOWDOWN_FACTOR = 3.0
"""Factor over the longest earlier duration of the same kind of work before a warning."""

_POLL_SECONDS = 1.0  # seconds
_IO_COUNTERS = Path("/proc/self/io")
_ACTIVE_BYTES = 2**20  # more than log files need
_NOT_RESPONDING = ", where files do not answer"
_MAX_NAMED = 3  # other processes in a warning


class _CurrentActivity(NamedTuple):
    """Current work of the main thread, such as a step: its kind, description and start time."""

    kind: str
    description: str
    is_storage: bool
    since: float


class Watchdog:
    """Thread that warns if the main thread's work, such as a step, takes unusually long.

    with Watchdog(300, disk, stop) as watchdog:
        watchdog.mark("step", "step 12")

    Processes exchange their status, so that each can name the one it waits for. After a stop
    signal, the process exits if files do not respond, as it may never reach the next step.
    """

    def __init__(
        self, limit: float, disk: Callable[[], float], received: Callable[[], str | None]
    ) -> None:
        """Create the watchdog, which starts when it is entered.

        Args:
            limit: seconds after which the watchdog warns.
            disk: returns the seconds for which the disk of offloaded state has not responded.
            received: returns the name of the received stop signal, or None.
        """
        self._limit, self._disk, self._received = limit, disk, received
        self._longest: dict[str, float] = defaultdict(float)  # seconds, by kind
        self._activity = _CurrentActivity("", "the start", False, time.monotonic())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)

    def mark_activity(self, kind: str, description: str, is_storage: bool = False) -> None:
        """Record that the main thread starts its next activity, such as a step or a save.

        Args:
            kind: kind of work, whose durations are similar.
            description: of the activity, for messages.
            is_storage: True if it waits for files only.
        """
        now, before = time.monotonic(), self._activity
        self._longest[before.kind] = max(self._longest[before.kind], now - before.since)
        self._activity = _CurrentActivity(kind, description, is_storage, now)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        last_report, last_work, files = 0.0, self._activity, _FileActivity()
        while not self._over.wait(_POLL_SECONDS):
            work, silence, now = self._activity, self._disk(), time.monotonic()
            elapsed, idle = now - work.since, files.idle_seconds()
            status = f"{work.description} for {elapsed:.0f} s"
            hangs = silence > self._limit
            waits = work.is_storage and min(idle, elapsed) > self._limit
            if hangs:
                status += (
                    f", since the disk of --execution.disk has not answered for {silence:.0f} s"
                )
            elif waits:
                status += _NOT_RESPONDING
            # Published early enough for the warning of process 0; empty while nothing is slow.
            popdist.set_status(status if hangs or elapsed > self._limit / 2 else "")
            if not hangs and elapsed <= max(
                self._limit, SLOWDOWN_FACTOR * self._longest[work.kind]
            ):
                continue
            peers = _peer_status()
            if work is not last_work or now - last_report >= REPEAT_SECONDS:
                last_report, last_work = now, work
                if is_first_process():
                    say(f"warning: the run is at {status}{_format_peers(peers, work.description)}")
            # While one process writes, its peers wait at the end of the save.
            hangs = hangs or (
                waits and all(text.endswith(_NOT_RESPONDING) for text in peers.values())
            )
            if hangs and (name := self._received()) is not None:
                popdist.fail(
                    f"ended by {name}, at {status}: what was saved before is intact",
                    signal_exit_code(Signals[name]),
                )


class _FileActivity:
    """Measures for how long this process has read and written hardly any file data."""

    def __init__(self) -> None:
        self._moved, self._since = 0, time.monotonic()

    def idle_seconds(self) -> float:
        """Return the seconds without file activity; 0 if unknown."""
        try:
            lines = _IO_COUNTERS.read_text().splitlines()
        except OSError:
            return 0.0
        counts = dict(line.split(": ") for line in lines)
        moved, now = int(counts["rchar"]) + int(counts["wchar"]), time.monotonic()
        if moved - self._moved >= _ACTIVE_BYTES:
            self._moved, self._since = moved, now
        return now - self._since


def _peer_status() -> dict[str, str]:
    """Return the current activity of each other process; empty if they do not answer."""
    try:
        return popdist.peer_status()
    except Exception:  # popdist reports a coordinator that does not respond
        return {}


def _format_peers(statuses: dict[str, str], description: str) -> str:
    """Format those processes whose current activity differs from this process's."""
    prefix = f"{description} for"
    different = [
        f"{who} is at {work}"
        for who, work in statuses.items()
        if work and (not work.startswith(prefix) or "has not answered" in work)
    ]
    more = f"; and {len(different) - _MAX_NAMED} more" if len(different) > _MAX_NAMED else ""
    return "".join(f"; {text}" for text in different[:_MAX_NAMED]) + more
