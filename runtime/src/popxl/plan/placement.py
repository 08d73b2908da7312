"""Placement search: which remote-buffer entries the free device memory holds permanently.

Entries of one kind that the same parts of the program move are a group. Step by step, the group
that saves most time per byte (`popxl.plan.time_estimate`) gets more entries on the device, until no
memory is left. They are spread evenly over the layers of their group, so that each layer's compute
hides transfers. Results are bit for bit the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from popxl._schedule.schedule import Routine, Transfer
from popxl._schedule.schedule_walk import routines_by_part
from popxl.plan.rates import Rates
from popxl.plan.time_estimate import Entry, StagedTimeEstimate
from popxl.plan.timeline import Timeline

if TYPE_CHECKING:
    from popxl.plan.plan import TracedProgram
    from popxl.remote_buffer import RemoteBuffer

MARGIN = 0.05  # fraction of the memory kept free: gaps grow from run to run (`Timeline.extent`)
_STEP = 1 / 32  # fraction of the free memory that is placed at a time
_TINY = 1e-4  # fraction of the free memory: a group that takes less is not worth a choice
_ROUND = 4  # choices until all groups are evaluated again
_GOLDEN = (5**0.5 - 1) / 2  # the first multiples of it, modulo 1, are spread evenly
_HOT = 8  # transfers per run of entries that many layers read
_SMALL = 2**20  # bytes
_LONG = 1000  # segments of a run that takes long to simulate
_ITERATIONS = 8  # iterations per loop for an estimate of its memory
_EASE = 0.01  # seconds that one second less of transfers is worth, hidden or not


@dataclass(frozen=True)
class PlacedKind:
    """Number, bytes and saved seconds of one kind of remote-buffer entries on the device.

    Attributes:
        label: label of their buffers (`RemoteBuffer.kind`).
        entries, total: number of entries on the device, and of all entries.
        nbytes: bytes of the entries on the device, on one replica.
        saves: seconds that a run would save with all entries of this kind alone on the device; 0 if
            everything fits.
    """

    label: str
    entries: int
    total: int
    nbytes: int
    saves: float


@dataclass(frozen=True)
class Placement:
    """The remote-buffer entries that a program keeps on the device, with simulated runs.

    Attributes:
        kinds: kinds of entries, those that save most time per byte first.
        all_host: the run with all entries in host memory.
        timeline: a simulated run with this placement.
        free_bytes: device bytes for entries of remote buffers.
        resident: indices of the entries on the device, by buffer.
        traced: the program.
    """

    kinds: Sequence[PlacedKind]
    all_host: AllHostSimulation
    timeline: Timeline
    free_bytes: int
    resident: Mapping[RemoteBuffer, Set[int]]
    traced: TracedProgram

    def apply(self) -> None:
        """Sets the program's device-placed remote-buffer entries and its prefetch window."""
        _apply_placement(self.traced, self.resident, self.timeline.window)

    def with_window(self, window: int, rates: Rates) -> Placement:
        """Applies this placement with another prefetch window, and simulates a run."""
        _apply_placement(self.traced, self.resident, window)
        return replace(self, timeline=self.traced.timeline(rates))

    @property
    def all_host_timeline(self) -> Timeline:
        """Timeline of a simulated run with all remote-buffer entries in host memory."""
        return self.all_host.timeline

    @property
    def nbytes(self) -> int:
        """Bytes of the remote-buffer entries that are placed on the device, on one replica."""
        return sum(kind.nbytes for kind in self.kinds)


class AllHostSimulation:
    """A run with all remote-buffer entries in host memory, simulated on first use.

    Args:
        window: bytes that loads may be ahead (`popxl.Ir.load_window`).
    """

    def __init__(self, traced: TracedProgram, rates: Rates, window: int | None = None) -> None:
        self._traced, self._rates, self._window = (
            traced,
            rates,
            window or traced.default_prefetch_window,
        )
        self._on_disk = {buffer: buffer.on_disk for buffer in traced.ir.remote_buffers}

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the simulated run with all remote-buffer entries in host memory."""
        with self._all_entries_on_host():
            return self._traced.timeline(self._rates, self._window)

    @cached_property
    def short_timeline(self) -> Timeline:
        """Timeline of the run with long loops cut short, with about the same peak memory."""
        if sum(self._traced.segment_runs.values()) <= _LONG:
            return self.timeline
        with self._all_entries_on_host():
            return self._traced.truncate_loops(_ITERATIONS).timeline(self._rates, self._window)

    @contextmanager
    def _all_entries_on_host(self) -> Iterator[None]:
        """Context in which no remote-buffer entry is placed on the device."""
        current = {buffer: (buffer.resident_entries, buffer.on_disk) for buffer in self._on_disk}
        for buffer, on_disk in self._on_disk.items():
            buffer.resident, buffer.on_disk = 0, on_disk
        try:
            yield
        finally:
            for buffer, (resident, on_disk) in current.items():
                buffer.resident, buffer.on_disk = resident, on_disk


def place_entries(
    traced: TracedProgram,
    rates: Rates,
    device_bytes: int,
    other_bytes: int | None = None,
    all_host: AllHostSimulation | None = None,
    window: int | None = None,
) -> Placement:
    """Chooses which remote-buffer entries stay on the device, and applies that to the program.

    Args:
        device_bytes: bytes of device memory for the program.
        other_bytes: bytes of device memory besides these entries; default: those of a run with all
            entries in host memory.
        all_host: the run with all entries in host memory, if it exists.
        window: bytes that loads may be ahead (`popxl.Ir.load_window`).
    """
    for buffer in traced.ir.remote_buffers:
        buffer.resident = 0
    all_host = all_host or AllHostSimulation(traced, rates, window)
    other_bytes = all_host.short_timeline.extent if other_bytes is None else other_bytes
    free_bytes = (
        int(device_bytes * (1 - MARGIN))
        - other_bytes
        - traced.permanent_storage().fixed_device_bytes
    )
    window = window or traced.default_prefetch_window
    time_estimate = traced.staged_time_estimate(rates, window)
    groups = list(_group_entries(traced, time_estimate))
    saves: dict[str, float] = {}
    if sum(group.nbytes for group in groups) > free_bytes:
        saves = _savings_by_kind(groups, time_estimate)
    _place_groups(groups, time_estimate, free_bytes)
    resident = _resident_indices(groups)
    _apply_placement(traced, resident, window)
    return Placement(
        _placed_kinds(groups, saves), all_host, traced.timeline(rates), free_bytes, resident, traced
    )


def estimate_placed(
    traced: TracedProgram, time_estimate: StagedTimeEstimate, free_bytes: int
) -> float:
    """Returns the estimated seconds of a run with its entries placed; places none in the program.

    Args:
        time_estimate: of a run with all entries in host memory; changed.
        free_bytes: bytes of device memory for entries.
    """
    _place_groups(list(_group_entries(traced, time_estimate)), time_estimate, free_bytes)
    return time_estimate.run_seconds()


class EntryGroup:
    """Equal buffer entries of all rows (usually layers); entries of a row are placed together.

    Attributes:
        num_placed: number of rows on the device, the first ones in the order of placement.
        nbytes: bytes of all entries.
    """

    def __init__(
        self, label: str, entries: Iterable[Entry], time_estimate: StagedTimeEstimate
    ) -> None:
        by_row: dict[int, list[Entry]] = defaultdict(list)
        for entry in entries:
            by_row[entry[1]].append(entry)
        self.label, self.num_placed = label, 0
        self._rows = [by_row[i] for i in sorted(by_row, key=lambda i: i * _GOLDEN % 1)]
        self._sizes = [sum(time_estimate.transfers[e].nbytes for e in row) for row in self._rows]
        self.nbytes = sum(self._sizes)

    @property
    def placed_nbytes(self) -> int:
        return sum(self._sizes[: self.num_placed])

    def next_placement(self, max_bytes: int, free_bytes: int) -> tuple[int, int]:
        """Returns the number of rows (layers) to place next, and their bytes; (0, 0) if none fits.

        Args:
            max_bytes: limit for several rows; a single one may take all free bytes.
        """
        count = nbytes = 0
        for size in self._sizes[self.num_placed :]:
            if nbytes + size > (max_bytes if count else free_bytes):
                break
            count, nbytes = count + 1, nbytes + size
        return count, nbytes

    def entries(self, start: int = 0, count: int | None = None) -> list[Entry]:
        """Returns the entries of `count` rows (layers) from `start` on; by default of all rows."""
        end = None if count is None else start + count
        return [entry for row in self._rows[start:end] for entry in row]

    def placed_entries(self) -> list[Entry]:
        """Returns the group's remote-buffer entries that are placed on the device."""
        return self.entries(0, self.num_placed)

    def place_all(self) -> None:
        self.num_placed = len(self._rows)


def _group_entries(
    traced: TracedProgram, time_estimate: StagedTimeEstimate
) -> Iterator[EntryGroup]:
    """Groups remote-buffer entries by kind of buffer and by the labelled regions that use it.

    Entries that many layers read are separate groups, and so are small ones, whose time is mostly
    latency.
    """
    parts = _regions_transferring_each_buffer(traced.schedule.main)
    grouped: dict[tuple[str, bool, frozenset[str]], list[Entry]] = defaultdict(list)
    on_disk_entries = cache(lambda buffer: frozenset(buffer.on_disk_entries))
    for (buffer, index), transfers in time_estimate.transfers.items():
        if index in on_disk_entries(buffer):
            continue
        label = buffer.kind or f"buffer {buffer.remote_buffer_id}"
        often = len(transfers.loads) + len(transfers.stores) > _HOT
        label += " that many layers read" if often else ""
        is_small = transfers.nbytes < _SMALL
        grouped[label, is_small, frozenset(parts[buffer])].append((buffer, index))
    return (EntryGroup(label, entries, time_estimate) for (label, *_), entries in grouped.items())


def _regions_transferring_each_buffer(main_routine: Routine) -> dict[RemoteBuffer, set[str]]:
    """Returns, for each remote buffer, the labelled regions that transfer its entries."""
    parts: dict[RemoteBuffer, set[str]] = defaultdict(set)
    for routine, part in routines_by_part(main_routine):
        for step in routine.steps:
            if isinstance(step, Transfer):
                parts[step.buffer].add(step.part or part)
    return parts


def _savings_by_kind(
    groups: Sequence[EntryGroup], time_estimate: StagedTimeEstimate
) -> dict[str, float]:
    """Returns the seconds that each kind of buffer entries alone would save on the device."""
    before, savings = time_estimate.run_seconds(), {}
    for label in {group.label: None for group in groups}:
        entries = [e for group in groups if group.label == label for e in group.entries()]
        with time_estimate.entries_on_device(entries):
            savings[label] = before - time_estimate.run_seconds()
    return savings


def _place_groups(
    groups: Sequence[EntryGroup], time_estimate: StagedTimeEstimate, free_bytes: int
) -> None:
    """Places all buffer entries if they fit, else the tiny ones and those that save most."""
    fits = sum(group.nbytes for group in groups) <= free_bytes
    tiny_bytes = free_bytes if fits else free_bytes * _TINY
    large = [group for group in groups if group.nbytes > tiny_bytes]
    for group in groups:
        if group.nbytes <= tiny_bytes:
            group.place_all()
            time_estimate.move_entries(group.entries(), -1)
            free_bytes -= group.nbytes
    _place_greedily(large, time_estimate, free_bytes)


def _place_greedily(
    groups: Sequence[EntryGroup], time_estimate: StagedTimeEstimate, free_bytes: int
) -> None:
    """Places the buffer entries that save most seconds per byte until the free memory is used.

    The savings of a group change little with one choice. Between rounds they are computed again
    only for the best group (Minoux, "Accelerated greedy algorithms", 1978).
    """
    step_bytes, remaining = int(free_bytes * _STEP), free_bytes
    num_choices, current_cost = 0, _estimated_cost(time_estimate)
    all_groups = [(-math.inf, -1, i) for i in range(len(groups))]
    queue = [*all_groups]  # cost of a byte, as of which choice, and the group
    while queue:
        cost, evaluated, i = heappop(queue)
        count, nbytes = groups[i].next_placement(min(step_bytes, remaining), remaining)
        if not count:
            continue
        entries = groups[i].entries(groups[i].num_placed, count)
        if evaluated < num_choices:
            with time_estimate.entries_on_device(entries):
                heappush(
                    queue,
                    ((_estimated_cost(time_estimate) - current_cost) / nbytes, num_choices, i),
                )
            continue
        time_estimate.move_entries(entries, -1)
        groups[i].num_placed += count
        remaining, num_choices, current_cost = (
            remaining - nbytes,
            num_choices + 1,
            _estimated_cost(time_estimate),
        )
        if num_choices % _ROUND:
            heappush(queue, (cost, -1, i))
        else:
            queue = [*all_groups]


def _estimated_cost(time_estimate: StagedTimeEstimate) -> float:
    return time_estimate.run_seconds() + _EASE * time_estimate.transfer_seconds


def _placed_kinds(groups: Sequence[EntryGroup], saves: dict[str, float]) -> list[PlacedKind]:
    """Returns the kinds of entries on the device, those that save most time per byte first."""
    of: dict[str, list[EntryGroup]] = defaultdict(list)
    for group in groups:
        of[group.label].append(group)
    order = sorted(of, key=lambda label: -saves.get(label, 0) / sum(g.nbytes for g in of[label]))
    return [
        PlacedKind(
            label,
            sum(len(group.placed_entries()) for group in of[label]),
            sum(len(group.entries()) for group in of[label]),
            sum(group.placed_nbytes for group in of[label]),
            saves.get(label, 0.0),
        )
        for label in order
    ]


def _resident_indices(groups: Sequence[EntryGroup]) -> Mapping[RemoteBuffer, Set[int]]:
    """Returns, for each remote buffer, the indices of the entries placed on the device."""
    resident: dict[RemoteBuffer, set[int]] = {}
    for group in groups:
        for buffer, _ in group.entries():
            resident.setdefault(buffer, set())
        for buffer, index in group.placed_entries():
            resident[buffer].add(index)
    return resident


def _apply_placement(
    traced: TracedProgram, resident: Mapping[RemoteBuffer, Set[int]], window: int
) -> None:
    for buffer, indices in resident.items():
        buffer.resident = indices
    traced.ir.load_window = window or None
