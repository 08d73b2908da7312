"""Estimate of a run's time from each stage's compute seconds and transferred bytes.

It follows the rules of `popxl.plan.simulated_device` with a few sums in place of a walker, so that
many placements can be compared in a second. A stage is a run of a segment, or of several short
ones, with the loads for it and its stores. A stage takes at least as long as the host needs to
dispatch it. Loads do not wait for a store to the same entry, as they would where a step has one or
two micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from popxl._schedule.schedule import Load, Run, Schedule
from popxl.plan.events import events_of_run

if TYPE_CHECKING:
    from popxl._schedule.segment import Segment
    from popxl.plan.rates import Rates
    from popxl.plan.segment_cost import SegmentCost
    from popxl.remote_buffer import RemoteBuffer

_STAGES = 500  # about so many at most

Entry = tuple["RemoteBuffer", int]


@dataclass(frozen=True)
class EntryTransfers:
    """Loads and stores of one remote-buffer entry in a run, by the stage of the run.

    Attributes:
        nbytes: bytes of the entry on one replica.
        loads: stages that load it.
        stores: stages that store it.
    """

    nbytes: int
    loads: list[int] = field(default_factory=list)
    stores: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class StagedTimeEstimate:
    """Compute and transfers of each stage (consecutive segment runs) of a run, to estimate time.

    Attributes:
        compute_seconds: seconds of computing of each stage.
        transfers: the transfers of each entry.
        loads, stores: bytes that each stage loads and stores.
        load_seconds, store_seconds: seconds of these transfers.
        dispatch_seconds: seconds in which the host dispatches each stage and its transfers.
        load_calls, store_calls: calls of the host for the transfers.
        rates: rates of the device.
        window: bytes that loads may be ahead of their use.
    """

    compute_seconds: Sequence[float]
    transfers: Mapping[Entry, EntryTransfers]
    loads: list[int]
    stores: list[int]
    load_seconds: list[float]
    store_seconds: list[float]
    dispatch_seconds: list[float]
    load_calls: Sequence[int]
    store_calls: Sequence[int]
    rates: Rates
    window: int

    @classmethod
    def from_schedule(
        cls,
        schedule: Schedule,
        segment_costs: Mapping[Segment, SegmentCost],
        rates: Rates,
        window: int,
    ) -> StagedTimeEstimate:
        """Creates the estimate of a program with all remote-buffer entries in host memory."""
        stages = StageBuilder(schedule, segment_costs, rates)
        count = len(stages.compute_seconds)
        entry_transfers = [0] * count, [0] * count, [0.0] * count, [0.0] * count
        calls = stages.dispatch_seconds, stages.load_calls, stages.store_calls
        time_estimate = cls(
            stages.compute_seconds, stages.transfers, *entry_transfers, *calls, rates, window
        )
        time_estimate.move_entries(stages.transfers, 1)
        return time_estimate

    def copy(self, window: int) -> StagedTimeEstimate:
        """Returns a copy, whose entries move on their own, with another prefetch window."""
        return replace(
            self,
            window=window,
            loads=list(self.loads),
            stores=list(self.stores),
            load_seconds=list(self.load_seconds),
            store_seconds=list(self.store_seconds),
            dispatch_seconds=list(self.dispatch_seconds),
        )

    def move_entries(self, entries: Iterable[Entry], sign: int) -> None:
        """Moves remote-buffer entries to host memory (`sign` 1) or to the device (`sign` -1)."""
        for entry in entries:
            transfers = self.transfers[entry]
            nbytes = sign * transfers.nbytes
            seconds = sign * self.rates.transfer_seconds(transfers.nbytes, both_ways=True)
            put = sign * self.rates.per_array_s
            for stage in transfers.loads:
                self.loads[stage] += nbytes
                self.load_seconds[stage] += seconds
                self.dispatch_seconds[stage] += put
            for stage in transfers.stores:
                self.stores[stage] += nbytes
                self.store_seconds[stage] += seconds
                self.dispatch_seconds[stage] += put

    @contextmanager
    def entries_on_device(self, entries: Sequence[Entry]) -> Iterator[None]:
        """Context in which the given remote-buffer entries are on the device."""
        self.move_entries(entries, -1)
        yield
        self.move_entries(entries, 1)

    @property
    def transfer_seconds(self) -> float:
        """Returns the seconds of all transfers in a run, without overlap."""
        return sum(self.load_seconds) + sum(self.store_seconds)

    def run_seconds(self) -> float:
        """Returns the estimated seconds of a run.

        Conditional expressions are faster than max and min, which would take most of the time.
        """
        end = load_end = store_end = 0.0
        ends, half, link = [end], self.window / 2, self.rates.host_link
        first = prefetched = (
            0  # what is loaded begins with stage `first`, and is so many bytes ahead
        )
        put = self.rates.transfer_dispatch_s
        stages = zip(
            self.loads, self.load_seconds, self.load_calls,
            self.compute_seconds, self.dispatch_seconds,
            self.store_seconds, self.store_calls,
            strict=True,
        )  # fmt: skip
        for stage, (
            loads,
            load_seconds,
            ins,
            compute_seconds,
            dispatch_seconds,
            store_seconds,
            outs,
        ) in enumerate(stages):
            dispatch_seconds += put * ((ins if loads else 0) + (outs if store_seconds else 0))
            prefetched += loads if stage else 0
            backlog = (store_end - end) * link if store_end > end else 0.0
            free_bytes = self.window - (half if backlog > half else backlog)
            while prefetched > free_bytes and first < stage:
                first += 1
                prefetched -= self.loads[first]
            load_end = (load_end if load_end > ends[first] else ends[first]) + load_seconds
            start = load_end if load_end > end else end
            write_limit = store_end - self.window / link
            busy_seconds = (
                compute_seconds if compute_seconds > dispatch_seconds else dispatch_seconds
            )
            end = (start if start > write_limit else write_limit) + busy_seconds
            ends.append(end)
            store_end = (store_end if store_end > end else end) + store_seconds
        return max(end, store_end)


class StageBuilder:
    """Groups the segment runs of a schedule into stages (see `StagedTimeEstimate`)."""

    def __init__(
        self, schedule: Schedule, segment_costs: Mapping[Segment, SegmentCost], rates: Rates
    ) -> None:
        self.compute_seconds, self.dispatch_seconds = [0.0], [0.0]
        self.load_calls, self.store_calls = [0], [0]
        self.transfers: dict[Entry, EntryTransfers] = {}
        each = {
            s: (cost.seconds(rates), cost.dispatch_seconds(rates))
            for s, cost in segment_costs.items()
        }
        events = events_of_run(schedule)
        spent = [max(each[step.segment]) for step, _ in events if isinstance(step, Run)]
        self._least = sum(spent) / _STAGES
        pending_loads: list[EntryTransfers] = []
        before: Any = None
        for step, index in events:
            if isinstance(step, Run):
                self._add_run(*each[step.segment], pending_loads)
                pending_loads.clear()
            else:
                entry = step.buffer, index[0] if isinstance(index, tuple) else index
                entry_transfers = self.transfers.setdefault(entry, EntryTransfers(step.nbytes))
                if isinstance(step, Load):
                    pending_loads.append(entry_transfers)
                else:
                    entry_transfers.stores.append(len(self.compute_seconds) - 1)
                    self.store_calls[-1] += not isinstance(before, type(step))
            before = step

    def _add_run(
        self, seconds: float, dispatch: float, pending_loads: Sequence[EntryTransfers]
    ) -> None:
        if max(self.compute_seconds[-1], self.dispatch_seconds[-1]) > self._least:
            for each in (
                self.compute_seconds,
                self.dispatch_seconds,
                self.load_calls,
                self.store_calls,
            ):
                each.append(0)
        self.compute_seconds[-1] += seconds
        self.dispatch_seconds[-1] += dispatch
        self.load_calls[-1] += bool(pending_loads)
        for entry_transfers in pending_loads:
            entry_transfers.loads.append(len(self.compute_seconds) - 1)
