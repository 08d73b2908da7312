"""A run of a program in bulk: seconds of computing, and bytes that come and go, stage by stage.

It follows the rules of `popxl.plan.simulated` with a few sums in place of a walker, so that many
placements can be compared in a second: a stage is a run of a segment, or several that are short,
with what is loaded for it and what it stores. Dispatching takes no time, and no load waits for a
store to the same entry, as it would where a step has one or two micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from popxl._schedule.schedule import Load, Run, Schedule
from popxl.plan.events import events_of

if TYPE_CHECKING:
    from popxl._schedule.segment import Segment
    from popxl.plan.rates import Rates
    from popxl.remote_buffer import RemoteBuffer

_STAGES = 1000  # about so many at most

Entry = tuple["RemoteBuffer", int]


@dataclass(frozen=True)
class Crossings:
    """When an entry is moved.

    Attributes:
        nbytes: of the entry, on one replica.
        loads: stages for which it is loaded.
        stores: stages that store it.
    """

    nbytes: int
    loads: list[int] = field(default_factory=list)
    stores: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Flow:
    """
    Attributes:
        computing: seconds of each stage.
        crossings: of each entry that is moved.
        loads, stores: bytes that go to and from the device for each stage.
        loading, storing: seconds that they take.
        rates: of the device.
        window: bytes that loads may be ahead of their use.
    """

    computing: Sequence[float]
    crossings: Mapping[Entry, Crossings]
    loads: list[int]
    stores: list[int]
    loading: list[float]
    storing: list[float]
    rates: Rates
    window: int

    @classmethod
    def of(
        cls, schedule: Schedule, seconds: Mapping[Segment, float], rates: Rates, window: int
    ) -> Flow:
        """The flow of a program of which all entries are in host memory."""
        computing, crossings = _stages(schedule, seconds)
        stages = len(computing)
        moved = [0] * stages, [0] * stages, [0.0] * stages, [0.0] * stages
        flow = cls(computing, crossings, *moved, rates, window)
        flow.move(crossings, 1)
        return flow

    def move(self, entries: Iterable[Entry], way: int) -> None:
        """Let entries live in host memory (1), or on the device (-1)."""
        for entry in entries:
            crossings = self.crossings[entry]
            nbytes = way * crossings.nbytes
            taking = way * self.rates.moving(crossings.nbytes, both_ways=True)
            for stage in crossings.loads:
                self.loads[stage] += nbytes
                self.loading[stage] += taking
            for stage in crossings.stores:
                self.stores[stage] += nbytes
                self.storing[stage] += taking

    @contextmanager
    def without(self, entries: Sequence[Entry]) -> Iterator[None]:
        """As if entries lived on the device."""
        self.move(entries, -1)
        yield
        self.move(entries, 1)

    @property
    def moving(self) -> float:
        """Seconds of all transfers, one after the other."""
        return sum(self.loading) + sum(self.storing)

    def seconds(self) -> float:
        """Of a run. Conditions stand where max and min would take most of the time."""
        end = arrived = left = 0.0
        ends, half, link = [end], self.window / 2, self.rates.host_link
        first = ahead = 0  # what is loaded begins with stage `first`, and is so many bytes ahead
        stages = zip(self.loads, self.loading, self.computing, self.storing, strict=True)
        for stage, (loads, loading, computing, storing) in enumerate(stages):
            ahead += loads if stage else 0
            backlog = (left - end) * link if left > end else 0.0
            room = self.window - (half if backlog > half else backlog)
            while ahead > room and first < stage:
                first += 1
                ahead -= self.loads[first]
            arrived = (arrived if arrived > ends[first] else ends[first]) + loading
            start = arrived if arrived > end else end
            behind = left - self.window / link
            end = (start if start > behind else behind) + computing
            ends.append(end)
            left = (left if left > end else end) + storing
        return max(end, left)


def _stages(
    schedule: Schedule, seconds: Mapping[Segment, float]
) -> tuple[list[float], dict[Entry, Crossings]]:
    """Seconds of each stage, and the stages that each entry is moved for."""
    events = events_of(schedule)
    spent = [seconds[step.segment] for step, _ in events if isinstance(step, Run)]
    least, runs = sum(spent) / _STAGES, iter(spent)
    computing, crossings = [0.0], dict[Entry, Crossings]()
    coming: list[Crossings] = []
    for step, index in events:
        if isinstance(step, Run):
            if computing[-1] > least:
                computing.append(0.0)
            computing[-1] += next(runs)
            for moved in coming:
                moved.loads.append(len(computing) - 1)
            coming.clear()
            continue
        entry = step.buffer, index[0] if isinstance(index, tuple) else index
        moved = crossings.setdefault(entry, Crossings(step.nbytes))
        if isinstance(step, Load):
            coming.append(moved)
        else:
            moved.stores.append(len(computing) - 1)
    return computing, crossings
