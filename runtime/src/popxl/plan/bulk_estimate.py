"""A bulk estimate of a run: seconds of computing and bytes loaded and stored, stage by stage.

It follows the rules of `popxl.plan.simulated_device` with a few sums in place of a walker, so that
many placements can be compared in a second. A stage is a run of a segment, or of several short
ones, with the loads for it and its stores. A stage takes at least as long as the host needs to
dispatch it. Loads do not wait for a store to the same entry, as they would where a step has one or
two micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from popxl._schedule.schedule import Load, Run, Schedule
from popxl.plan.events import events_of

if TYPE_CHECKING:
    from popxl._schedule.segment import Segment
    from popxl.plan.rates import Rates
    from popxl.plan.segment_cost import SegmentWork
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
        dispatching: seconds in which the host dispatches each stage and these transfers.
        load_calls, store_calls: calls of the host for them, if there are any.
        rates: of the device.
        window: bytes that loads may be ahead of their use.
    """

    computing: Sequence[float]
    crossings: Mapping[Entry, Crossings]
    loads: list[int]
    stores: list[int]
    loading: list[float]
    storing: list[float]
    dispatching: list[float]
    load_calls: Sequence[int]
    store_calls: Sequence[int]
    rates: Rates
    window: int

    @classmethod
    def of(
        cls, schedule: Schedule, works: Mapping[Segment, SegmentWork], rates: Rates, window: int
    ) -> Flow:
        """The flow of a program of which all entries are in host memory."""
        made = _Stages(schedule, works, rates)
        count = len(made.computing)
        moved = [0] * count, [0] * count, [0.0] * count, [0.0] * count
        calls = made.dispatching, made.load_calls, made.store_calls
        flow = cls(made.computing, made.crossings, *moved, *calls, rates, window)
        flow.move(made.crossings, 1)
        return flow

    def move(self, entries: Iterable[Entry], way: int) -> None:
        """Let entries live in host memory (1), or on the device (-1)."""
        for entry in entries:
            crossings = self.crossings[entry]
            nbytes = way * crossings.nbytes
            taking = way * self.rates.moving(crossings.nbytes, both_ways=True)
            put = way * self.rates.put_array
            for stage in crossings.loads:
                self.loads[stage] += nbytes
                self.loading[stage] += taking
                self.dispatching[stage] += put
            for stage in crossings.stores:
                self.stores[stage] += nbytes
                self.storing[stage] += taking
                self.dispatching[stage] += put

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
        put = self.rates.put
        stages = zip(
            self.loads, self.loading, self.load_calls,
            self.computing, self.dispatching,
            self.storing, self.store_calls,
            strict=True,
        )  # fmt: skip
        for stage, (loads, loading, ins, computing, dispatching, storing, outs) in enumerate(
            stages
        ):
            dispatching += put * ((ins if loads else 0) + (outs if storing else 0))
            ahead += loads if stage else 0
            backlog = (left - end) * link if left > end else 0.0
            room = self.window - (half if backlog > half else backlog)
            while ahead > room and first < stage:
                first += 1
                ahead -= self.loads[first]
            arrived = (arrived if arrived > ends[first] else ends[first]) + loading
            start = arrived if arrived > end else end
            behind = left - self.window / link
            busy = computing if computing > dispatching else dispatching
            end = (start if start > behind else behind) + busy
            ends.append(end)
            left = (left if left > end else end) + storing
        return max(end, left)


class _Stages:
    """The stages of a run of a program, see `Flow`."""

    def __init__(
        self, schedule: Schedule, works: Mapping[Segment, SegmentWork], rates: Rates
    ) -> None:
        self.computing, self.dispatching = [0.0], [0.0]
        self.load_calls, self.store_calls = [0], [0]
        self.crossings: dict[Entry, Crossings] = {}
        each = {s: (work.seconds(rates), work.dispatch(rates)) for s, work in works.items()}
        events = events_of(schedule)
        spent = [max(each[step.segment]) for step, _ in events if isinstance(step, Run)]
        self._least = sum(spent) / _STAGES
        coming: list[Crossings] = []
        before: Any = None
        for step, index in events:
            if isinstance(step, Run):
                self._run(*each[step.segment], coming)
                coming.clear()
            else:
                entry = step.buffer, index[0] if isinstance(index, tuple) else index
                moved = self.crossings.setdefault(entry, Crossings(step.nbytes))
                if isinstance(step, Load):
                    coming.append(moved)
                else:
                    moved.stores.append(len(self.computing) - 1)
                    self.store_calls[-1] += not isinstance(before, type(step))
            before = step

    def _run(self, seconds: float, dispatch: float, coming: Sequence[Crossings]) -> None:
        if max(self.computing[-1], self.dispatching[-1]) > self._least:
            for each in (self.computing, self.dispatching, self.load_calls, self.store_calls):
                each.append(0)
        self.computing[-1] += seconds
        self.dispatching[-1] += dispatch
        self.load_calls[-1] += bool(coming)
        for moved in coming:
            moved.loads.append(len(self.computing) - 1)
