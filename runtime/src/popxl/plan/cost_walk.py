"""Walk of a schedule that sums costs and live bytes by labelled region (`popxl.plan.part`)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from popxl._schedule.schedule import (
    Branch,
    Compute,
    Load,
    Loop,
    Register,
    Routine,
    Run,
    Schedule,
    Step,
    Store,
    routine_calls,
)
from popxl._schedule.schedule_walk import routines_by_part
from popxl.plan.events import events_of_run
from popxl.plan.loop_extrapolation import measure_extrapolated
from popxl.plan.records import Collective, RegionCost
from popxl.plan.segment_cost import Cost, SegmentCost

if TYPE_CHECKING:
    from popxl._analysis.functionalization import Node
    from popxl._schedule.segment import Segment

_HOST_OPS = {Load: "remote_load", Store: "remote_store"}
_WAYS = {Load: ("host_to_device", "disk_read"), Store: ("device_to_host", "disk_written")}


@dataclass
class RegionSums:
    """Costs, transferred bytes and peak of live bytes of one labelled region of the program.

    Attributes:
        bytes_moved: bytes by direction; of steps whose entries are in several places, their mean.
        device_bytes: peak of the live bytes, without those that callers keep; None: no step.
    """

    cost: Cost = field(default_factory=Cost)
    bytes_moved: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ops: Counter[str] = field(default_factory=Counter)
    device_bytes: int | None = None

    def record_live_bytes(self, nbytes: int) -> None:
        self.device_bytes = max(self.device_bytes or 0, nbytes)

    def add(self, other: RegionSums, times: int, outside_bytes: int) -> None:
        """Adds a called routine's sums `times` times; `outside_bytes` are alive in the caller."""
        if other.device_bytes is not None:
            self.record_live_bytes(outside_bytes + other.device_bytes)
        if times:
            self.cost.add(other.cost, times)
            for direction, nbytes in other.bytes_moved.items():
                self.bytes_moved[direction] += times * nbytes
            for name, count in other.ops.items():
                self.ops[name] += times * count


@dataclass
class RoutineCost:
    """Cost of one execution of a routine (host steps): peak of live bytes, and sums by region."""

    peak: int
    sums: dict[str, RegionSums]


class CostWalk:
    """Sums the costs of a schedule, with each routine once per labelled region that calls it.

    Args:
        segment_costs: costs of the segments; empty: only memory is computed.
        temporaries: returns the bytes of a segment's temporaries.
    """

    def __init__(
        self, segment_costs: Mapping[Segment, SegmentCost], temporaries: Callable[[Segment], int]
    ) -> None:
        self._works, self._temporaries = segment_costs, temporaries
        self._visits: dict[tuple[Routine, str], RoutineCost] = {}
        self._transfer_places: TransferCounts | None = (
            None  # of the entries that steps load and store
        )

    def run(self, schedule: Schedule) -> int:
        """Walks a schedule; returns the peak bytes of live intermediate values."""
        main, self._schedule = schedule.main, schedule
        for routine, part in routines_by_part(main):
            caller_owned = {*routine.inputs} - {routine.inputs[i] for i in routine.consumed_inputs}
            if routine is main:
                caller_owned = {*main.inputs, *main.outputs}
            self._visits[routine, part] = routine_cost = self._walk_routine(
                routine, part, caller_owned
            )
        self._sums = routine_cost.sums
        return routine_cost.peak

    # ---- memory ---------------------------------------------------------------------------------
    def _walk_routine(
        self, routine: Routine, part: str, caller_owned: set[Register]
    ) -> RoutineCost:
        """Returns the cost of a routine, with `caller_owned` registers counted as 0 bytes."""
        sums: dict[str, RegionSums] = defaultdict(RegionSums)
        owned = [s for s in routine.inputs if s in routine.specs]
        live = {s: 0 if s in caller_owned else _register_bytes(routine, s) for s in owned}
        total = peak = sum(live.values())
        for step in routine.steps:
            label = step.part or part
            new = {s: _register_bytes(routine, s) for s in step.writes() if s in routine.specs}
            now = total + self._step_bytes(step, label, total, live, new, sums)
            peak = max(peak, now)
            if self._works:
                sums[label].record_live_bytes(now)
            live.update(new)
            total += sum(new.values())
            donated = step.body.donated if isinstance(step, Loop) else ()
            for register in (*step.dead_registers, *donated):
                total -= live.pop(register, 0)
        return RoutineCost(peak, sums)

    def _step_bytes(
        self,
        step: Step,
        part: str,
        total: int,
        live: Mapping[Register, int],
        new: Mapping[Register, int],
        sums: dict[str, RegionSums],
    ) -> int:
        """Returns the live bytes that a step adds; adds the step's cost to its region's `sums`."""
        if isinstance(step, Run):
            self._count_run(step.segment, part, sums)
            reused = sum(live.get(step.args[i], 0) for i in step.segment.donated)
            return sum(new.values()) - reused + self._temporaries(step.segment)
        if isinstance(step, (Load, Store)):
            self._count_transfer(step, sums[part])
        if isinstance(step, Compute) and not step.outs:
            sums[part].ops[step.name] += 1
        peak = sum(new.values()) if isinstance(step, Load) else 0
        for call_args in routine_calls(step):
            # Conditions on the device are taken to be false: the second branch runs.
            done = not isinstance(step, Branch) or call_args is step.branches[1]
            times = (step.count if isinstance(step, Loop) else 1) if done else 0
            routine = call_args.routine
            handed = [i for i in routine.consumed_inputs if i not in call_args.copies]
            bytes_moved = sum(live.get(call_args.args[i], 0) for i in handed)
            routine_cost = self._visits[routine, part]
            for label, inner in routine_cost.sums.items():
                sums[label].add(inner, times, total - bytes_moved)
            peak = max(peak, routine_cost.peak - bytes_moved)
        return peak

    # ---- sums -----------------------------------------------------------------------------------
    def _count_run(self, segment: Segment, part: str, sums: dict[str, RegionSums]) -> None:
        if segment in self._works:
            for label, cost in self._works[segment].parts.items():
                sums[label or part].cost.add(cost)
            waiting = [(node, node.part or part, 1) for node in segment.nodes]
            while waiting:
                node, label, times = waiting.pop()
                self._count_node(node, label, times, sums)
                for region in node.regions:
                    waiting += [(inner, inner.part or label, times * region.count)
                                for inner in region.graph.nodes]  # fmt: skip

    @staticmethod
    def _count_node(node: Node, part: str, times: int, sums: dict[str, RegionSums]) -> None:
        op = node.op
        if op is None or node.kind in ("view", "write"):
            return
        part_sums = sums[part]
        part_sums.ops[op.defn.name] += times
        if "stream" in op.attrs:
            nbytes = times * math.prod(op.attrs["stream"].shape) * op.attrs["stream"].dtype.itemsize
            part_sums.bytes_moved["host_to_device" if op.outputs else "device_to_host"] += nbytes

    def _count_transfer(self, step: Load | Store, sums: RegionSums) -> None:
        if not self._works:
            return
        sums.ops[_HOST_OPS[type(step)]] += 1
        resident, on_disk = self._location_fractions(step)
        to, disk = _WAYS[type(step)]
        sums.bytes_moved[to] += step.nbytes * (1 - resident)
        sums.bytes_moved[disk] += step.nbytes * on_disk

    def _location_fractions(self, step: Load | Store) -> tuple[float, float]:
        """Returns the fractions of a step's remote-buffer entries on the device and on disk."""
        buffer = step.buffer
        resident, on_disk = len(buffer.resident_entries), len(buffer.on_disk_entries)
        if buffer.entries in (resident, on_disk) or not (resident or on_disk):
            return float(resident > 0), float(on_disk > 0)
        if self._transfer_places is None:
            self._transfer_places = TransferCounts.from_schedule(self._schedule)
        return self._transfer_places.location_fractions(step)

    def parts(self) -> tuple[RegionCost, ...]:
        """Returns the cost of each labelled region."""
        return tuple(
            RegionCost(
                name,
                sums.cost.flops,
                sums.cost.arithmetic,
                sums.cost.traffic,
                round(sums.bytes_moved["host_to_device"]),
                round(sums.bytes_moved["device_to_host"]),
                tuple(
                    Collective(*key, counts["count"], counts["nbytes"])
                    for key, counts in sorted(sums.cost.collectives.items())
                ),
                dict(sorted(sums.ops.items())),
                sums.device_bytes or 0,
                sums.cost.float8_flops,
                round(sums.bytes_moved["disk_read"]),
                round(sums.bytes_moved["disk_written"]),
            )
            for name, sums in self._sums.items()
        )


@dataclass
class TransferCounts:
    """Number of runs of each transfer step: all, with the entry on the device, with it on disk."""

    all: Counter[Load | Store] = field(default_factory=Counter)
    resident: Counter[Load | Store] = field(default_factory=Counter)
    on_disk: Counter[Load | Store] = field(default_factory=Counter)

    @classmethod
    def from_schedule(cls, schedule: Schedule) -> TransferCounts:
        """Counts the executions of each transfer step in a run of a schedule."""
        short, long, times = measure_extrapolated(schedule, cls._count_transfers, 1, 1)
        for name, counts in vars(long).items():
            short_counts = vars(short)[name]
            for step in counts:
                counts[step] += round(times) * (counts[step] - short_counts[step])
        return long

    @classmethod
    def _count_transfers(cls, schedule: Schedule) -> TransferCounts:
        counts_by_step = cls()
        resident_entries = cache(lambda buffer: buffer.resident_entries)
        on_disk_entries = cache(lambda buffer: frozenset(buffer.on_disk_entries))
        for step, index in events_of_run(schedule):
            if isinstance(step, Run):
                continue
            entry = index[0] if isinstance(index, tuple) else index  # replicas are alike
            counts_by_step.all[step] += 1
            counts_by_step.resident[step] += entry in resident_entries(step.buffer)
            counts_by_step.on_disk[step] += entry in on_disk_entries(step.buffer)
        return counts_by_step

    def location_fractions(self, step: Load | Store) -> tuple[float, float]:
        """Returns the fractions of a step's executions with its entry on the device and on disk."""
        count = self.all[step] or 1
        return self.resident[step] / count, self.on_disk[step] / count


def _register_bytes(routine: Routine, register: Register) -> int:
    spec = routine.specs[register]
    return math.prod(spec.shape) * spec.dtype.itemsize
