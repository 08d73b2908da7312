"""Times of a program's parts, measured while the host walks its schedule.

Two questions have two answers. As a program runs, the host asks for work and the devices do it
later: what can be seen is how long the host takes to ask, and how long it waits. If the host waits
for every step of the schedule before it asks for the next, each step's own time is seen, and
nothing overlaps. `Timing.apart` chooses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from popxl._schedule.schedule import Branch, Fetch, Load, Loop, Run, Step, Store

if TYPE_CHECKING:
    from popxl._schedule.schedule_walk import Steps
    from popxl._storage.in_place_mover import Direct
    from popxl._storage.prefetch import Transit


@dataclass
class Work:
    """What was measured of one kind of work.

    Attributes:
        count: steps of the schedule.
        seconds: that the host spent on them, without waiting.
        waiting: seconds that the host waited for the devices.
    """

    count: int = 0
    seconds: float = 0.0
    waiting: float = 0.0

    def add(self, seconds: float, waiting: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.waiting += waiting


@dataclass
class PartTimes:
    """Times of a part of the program (see `popxl.plan.part`), all on the host's clock.

    Attributes:
        loads, stores: transfers from and to remote buffers.
        runs: segments.
        rest: numbers of the host, also those it fetches from the devices.
    """

    loads: Work = field(default_factory=Work)
    runs: Work = field(default_factory=Work)
    stores: Work = field(default_factory=Work)
    rest: Work = field(default_factory=Work)

    @property
    def all(self) -> tuple[Work, ...]:
        return self.loads, self.runs, self.stores, self.rest

    @property
    def seconds(self) -> float:
        """Seconds of the host that were not waiting."""
        return sum(work.seconds for work in self.all)

    @property
    def waiting(self) -> float:
        """Seconds of the host that were."""
        return sum(work.waiting for work in self.all)


@dataclass
class Timing:
    """What the runs in a `Session.timing` context took.

    Attributes:
        apart: the host waited for each step of the schedule before the next.
        parts: by label, in order of execution; "" is what is in no part. Labels of a segment that
            ops of several parts share are joined by " + ".
        segments: by name.
        programs: runs of the program.
        seconds: of these runs in all. What is in no part is bringing inputs, and waiting for and
            fetching results.
    """

    apart: bool = False
    parts: dict[str, PartTimes] = field(default_factory=dict)
    segments: dict[str, Work] = field(default_factory=dict)
    programs: int = 0
    seconds: float = 0.0

    @contextmanager
    def program(self) -> Iterator[None]:
        """Measure a run of the program."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
        self.programs += 1


class Timer:
    """Measures the steps of a walk, and names their parts in a profiler's trace."""

    def __init__(self, timing: Timing, moving: Direct | Transit) -> None:
        self._timing, self._moving = timing, moving

    def __call__(self, steps: Steps) -> Steps:
        """See `popxl._schedule.schedule_walk`."""
        for step, at in steps:
            if isinstance(step, (Loop, Branch)):
                yield step, at
                continue
            label = at.part_of(step)
            waited, start = self._moving.waited, time.perf_counter()
            with jax.profiler.TraceAnnotation(label or "no part"):
                yield step, at
                if self._timing.apart:
                    self._complete(step, at.slots)
            seconds = time.perf_counter() - start
            waiting = seconds if isinstance(step, Fetch) else self._moving.waited - waited
            self._note(step, label, seconds - waiting, waiting)

    def _note(self, step: Step, label: str, seconds: float, waiting: float) -> None:
        part = self._timing.parts.setdefault(label, PartTimes())
        match step:
            case Load():
                part.loads.add(seconds, waiting)
            case Store():
                part.stores.add(seconds, waiting)
            case Run():
                part.runs.add(seconds, waiting)
                segments = self._timing.segments
                segments.setdefault(step.segment.name, Work()).add(seconds, waiting)
            case _:
                part.rest.add(seconds, waiting)

    def _complete(self, step: Step, slots: list[Any]) -> None:
        """Wait for a transfer; for segments the program does, since results may have no slot."""
        match step:
            case Load():
                jax.block_until_ready(slots[step.out])
            case Store():
                self._moving.complete(step, slots[step.at])
