"""Times of a program's parts, measured while the host walks its schedule.

Two questions have two answers. As a program runs, the host asks for work and the devices do it
later: what can be seen is how long the host takes to ask, and how long it waits. If the host waits
for every step of the schedule before it asks for the next, each step's own time is seen, and
nothing overlaps. `Timing.apart` chooses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from popxl._run.walker import Do, Walker
from popxl._schedule.schedule import Branch, Fetch, Load, Loop, Run, Step, Store
from popxl._schedule.segment import Segment


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


class LabelledWalker(Walker):
    """A walker that knows which part of the program a step belongs to."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._part = ""
        self._do = {
            kind: self._nested(do) if kind in (Loop, Branch) else self._observed(kind, do)
            for kind, do in self._do.items()
        }

    def _observed(self, kind: type[Step], do: Do) -> Do:
        """What is done for a step of a kind that runs no other steps."""
        return do

    def _nested(self, do: Do) -> Do:
        def run(step: Step, slots: list[Any], updates: int) -> None:
            outer, self._part = self._part, step.part or self._part
            do(step, slots, updates)
            self._part = outer

        return run

    def _label(self, step: Step) -> str:
        """The part of a step; a segment may hold ops of several."""
        if isinstance(step, Run) and not step.part:
            found = [node.part for node in step.segment.nodes if node.part]
            return " + ".join(dict.fromkeys(found)) or self._part
        return step.part or self._part


class TimedWalker(LabelledWalker):
    """A walker that measures, and names the parts in a profiler's trace."""

    def __init__(self, timing: Timing, *args: Any) -> None:
        self._timing = timing
        super().__init__(*args)
        if timing.apart:
            self._call = self._completing(self._call)

    def _observed(self, kind: type[Step], do: Do) -> Do:
        def run(step: Any, slots: list[Any], updates: int) -> None:
            label = self._label(step)
            waited, start = self._moving.waited, time.perf_counter()
            with jax.profiler.TraceAnnotation(label or "no part"):
                do(step, slots, updates)
                if self._timing.apart:
                    self._complete(step, slots)
            seconds = time.perf_counter() - start
            waiting = seconds if kind is Fetch else self._moving.waited - waited
            self._note(step, label, seconds - waiting, waiting)

        return run

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

    # ---- one after the other ------------------------------------------------------------------
    def _complete(self, step: Step, slots: list[Any]) -> None:
        """Wait for a transfer; for segments `_completing` does, since results may have no slot."""
        match step:
            case Load():
                jax.block_until_ready(slots[step.out])
            case Store():
                self._moving.complete(step, slots[step.at])

    @staticmethod
    def _completing(
        call: Callable[[Segment, Sequence[jax.Array]], Sequence[jax.Array]],
    ) -> Callable[[Segment, Sequence[jax.Array]], Sequence[jax.Array]]:
        def run(segment: Segment, arguments: Sequence[jax.Array]) -> Sequence[jax.Array]:
            return jax.block_until_ready(call(segment, arguments))

        return run
