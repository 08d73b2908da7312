"""Saying what a run waits for, when a step, a save or a disk takes unusually long."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from signal import Signals
from typing import NamedTuple, Self

import popdist
from terminal.interrupts import exit_code
from terminal.screen import is_first_process, say

AGAIN = 60.0  # seconds between two lines about one stall
USUAL = 3.0
"""By how much the longest before may be exceeded: where every step takes an hour, none stalls."""

_LOOK = 1.0  # seconds
_COUNTS = Path("/proc/self/io")
_MUCH = 2**20  # bytes: more than a log takes
_IDLE = ", where files do not answer"
_NAMED = 3  # other processes in a line


class _Work(NamedTuple):
    kind: str
    what: str
    is_storage: bool
    since: float


class Watchdog:
    """A thread that looks at how long the main thread has been at one thing.

    with Watchdog(300, disk, stop) as watchdog:
        watchdog.at("step", "step 12")

    Other processes learn what it is, so that each can say whom it waits for. After a signal, files
    that do not answer are given up, with the process: the next step, at which it would end, may
    never come.
    """

    def __init__(
        self, limit: float, disk: Callable[[], float], received: Callable[[], str | None]
    ) -> None:
        """
        Args:
            limit: seconds.
            disk: gives for how many seconds the disk of entries has not answered.
            received: gives the name of the signal that asked for the end; None: none did.
        """
        self._limit, self._disk, self._received = limit, disk, received
        self._longest: dict[str, float] = defaultdict(float)  # seconds, by kind
        self._work = _Work("", "the start", False, time.monotonic())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)

    def at(self, kind: str, what: str, is_storage: bool = False) -> None:
        """Note what the main thread begins.

        Args:
            kind: what takes as long each time.
            what: for people.
            is_storage: it waits for files alone.
        """
        now, before = time.monotonic(), self._work
        self._longest[before.kind] = max(self._longest[before.kind], now - before.since)
        self._work = _Work(kind, what, is_storage, now)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        said, at, files = 0.0, self._work, _Files()
        while not self._over.wait(_LOOK):
            work, silence, now = self._work, self._disk(), time.monotonic()
            passed, idle = now - work.since, files.idle()
            told = f"{work.what} for {passed:.0f} s"
            hangs = silence > self._limit
            waits = work.is_storage and min(idle, passed) > self._limit
            if hangs:
                told += f", since the disk of --execution.disk has not answered for {silence:.0f} s"
            elif waits:
                told += _IDLE
            # Soon enough for the line of process 0, and nothing where nothing stalls.
            popdist.set_status(told if hangs or passed > self._limit / 2 else "")
            if not hangs and passed <= max(self._limit, USUAL * self._longest[work.kind]):
                continue
            others = _others()
            if work is not at or now - said >= AGAIN:
                said, at = now, work
                if is_first_process():
                    say(f"warning: the run is at {told}{_differing(others, work.what)}")
            # While one process writes, the others of a save wait.
            hangs = hangs or (waits and all(text.endswith(_IDLE) for text in others.values()))
            if hangs and (name := self._received()) is not None:
                popdist.fail(
                    f"ended by {name}, at {told}: what was saved before is intact",
                    exit_code(Signals[name]),
                )


class _Files:
    """How long this process has read and written hardly anything."""

    def __init__(self) -> None:
        self._moved, self._since = 0, time.monotonic()

    def idle(self) -> float:
        """Seconds; 0 where nobody can tell."""
        try:
            lines = _COUNTS.read_text().splitlines()
        except OSError:
            return 0.0
        counts = dict(line.split(": ") for line in lines)
        moved, now = int(counts["rchar"]) + int(counts["wchar"]), time.monotonic()
        if moved - self._moved >= _MUCH:
            self._moved, self._since = moved, now
        return now - self._since


def _others() -> dict[str, str]:
    """What each other process is at; "": nothing that stalls."""
    try:
        return popdist.peer_status()
    except Exception:  # a service that hangs is told of by who watches it
        return {}


def _differing(works: dict[str, str], what: str) -> str:
    """Other processes that are at something else than this one, in words."""
    same = f"{what} for"
    differ = [
        f"{who} is at {work}"
        for who, work in works.items()
        if work and (not work.startswith(same) or "has not answered" in work)
    ]
    more = f"; and {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
    return "".join(f"; {text}" for text in differ[:_NAMED]) + more
