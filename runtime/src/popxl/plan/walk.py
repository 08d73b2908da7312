"""A schedule walked with sizes in place of arrays."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from popxl._lower.lookahead import accesses
from popxl._lower.schedule import (
    Branch,
    Load,
    Loop,
    Passed,
    Routine,
    Run,
    Schedule,
    Slot,
    Step,
    Store,
    calls,
)
from popxl.plan.records import Collective, Part
from popxl.plan.work import SegmentWork, Work

if TYPE_CHECKING:
    from popxl._core.functional import Node
    from popxl._lower.segment import Segment

_HOST_OPS = {Load: "remote_load", Store: "remote_store"}


@dataclass
class _Sums:
    """What a part amounts to."""

    work: Work = field(default_factory=Work)
    host_to_device: int = 0
    device_to_host: int = 0
    disk_read: int = 0
    disk_written: int = 0
    ops: Counter[str] = field(default_factory=Counter)
    device_bytes: int = 0


class Walk:
    """Walks a schedule once, however often its loops run.

    Args:
        works: what segments do; without it only memory is looked at.
        temporaries: bytes that a segment takes beside its arguments and results.
    """

    def __init__(
        self, works: Mapping[Segment, SegmentWork], temporaries: Callable[[Segment], int]
    ) -> None:
        self._works, self._temporaries = works, temporaries
        self._sums: dict[str, _Sums] = defaultdict(_Sums)
        self._placed: _Places | None = None  # of the entries that steps load and store

    def run(self, schedule: Schedule) -> int:
        """Walk; returns the most bytes of intermediate values that are live at a time."""
        main, self._schedule = schedule.main, schedule
        stored = {*main.inputs, *main.outputs}
        return self._routine(main, "", 1, 0, stored)

    # ---- memory ---------------------------------------------------------------------------------
    def _routine(
        self, routine: Routine, part: str, times: int, outside: int, borrowed: set[Slot]
    ) -> int:
        """Most bytes live while a routine runs, those of `borrowed` slots not included.

        Args:
            outside: bytes that its callers keep alive.
        """
        owned = [s for s in routine.inputs if s in routine.specs]
        live = {s: 0 if s in borrowed else _size(routine, s) for s in owned}
        total = most = sum(live.values())
        for step in routine.steps:
            label = step.part or part
            made = {s: _size(routine, s) for s in step.writes() if s in routine.specs}
            now = total + self._during(step, label, times, outside + total, live, made)
            most = max(most, now)
            self._note(label, outside + now)
            live.update(made)
            total += sum(made.values())
            donated = step.body.donated if isinstance(step, Loop) else ()
            for slot in (*step.last, *donated):
                total -= live.pop(slot, 0)
        return most

    def _during(
        self,
        step: Step,
        part: str,
        times: int,
        outside: int,
        live: Mapping[Slot, int],
        made: Mapping[Slot, int],
    ) -> int:
        """Bytes that a step takes while it runs, besides older slots; counts what it does."""
        if isinstance(step, Run):
            self._count_run(step.segment, part, times)
            reused = sum(live.get(step.args[i], 0) for i in step.segment.donated)
            return sum(made.values()) - reused + self._temporaries(step.segment)
        if isinstance(step, (Load, Store)):
            self._count_transfer(step, part, times)
        most = sum(made.values()) if isinstance(step, Load) else 0
        for passed in calls(step):
            # What devices decide is taken to be 0: of two branches the second is what is done.
            done = not isinstance(step, Branch) or passed is step.branches[1]
            most = max(most, self._call(step, passed, part, times if done else 0, outside, live))
        return most

    def _call(
        self,
        step: Step,
        passed: Passed,
        part: str,
        times: int,
        outside: int,
        live: Mapping[Slot, int],
    ) -> int:
        routine = passed.routine
        handed = [i for i in routine.consumed if i not in passed.copies]
        moved = sum(live.get(passed.args[i], 0) for i in handed)
        count = step.count if isinstance(step, Loop) else 1
        consumed = {routine.inputs[i] for i in routine.consumed}
        borrowed = {s for s in routine.inputs if s not in consumed}
        inside = self._routine(routine, part, times * count, outside - moved, borrowed)
        return inside - moved

    # ---- sums -----------------------------------------------------------------------------------
    def _note(self, part: str, live: int) -> None:
        if self._works:
            sums = self._sums[part]
            sums.device_bytes = max(sums.device_bytes, live)

    def _count_run(self, segment: Segment, part: str, times: int) -> None:
        if segment not in self._works or not times:
            return
        for label, work in self._works[segment].parts.items():
            self._sums[label or part].work.add(work, times)
        for node in segment.nodes:
            self._count_node(node, node.part or part, times)

    def _count_node(self, node: Node, part: str, times: int) -> None:
        op = node.op
        if op is None or node.kind in ("view", "write"):
            return
        sums = self._sums[part]
        sums.ops[op.defn.name] += times
        if "stream" in op.attrs:
            nbytes = times * math.prod(op.attrs["stream"].shape) * op.attrs["stream"].dtype.itemsize
            if op.outputs:
                sums.host_to_device += nbytes
            else:
                sums.device_to_host += nbytes
        for region in node.regions:
            for inner in region.graph.nodes:
                self._count_node(inner, inner.part or part, times * region.count)

    def _count_transfer(self, step: Load | Store, part: str, times: int) -> None:
        if not self._works or not times:
            return
        sums = self._sums[part]
        sums.ops[_HOST_OPS[type(step)]] += times
        resident, on_disk = self._fractions(step)
        away = round(times * step.nbytes * (1 - resident))
        filed = round(times * step.nbytes * on_disk)
        if isinstance(step, Load):
            sums.host_to_device += away
            sums.disk_read += filed
        else:
            sums.device_to_host += away
            sums.disk_written += filed

    def _fractions(self, step: Load | Store) -> tuple[float, float]:
        """Of what a step moves: fractions that stay on the device, and that are on disk."""
        kept, filed = len(step.buffer.residents), min(step.buffer.on_disk, step.buffer.entries)
        if step.buffer.entries in (kept, filed) or not (kept or filed):
            return float(kept > 0), float(filed > 0)
        if self._placed is None:
            self._placed = _Places.of(self._schedule)
        return self._placed.fractions(step)

    def parts(self) -> tuple[Part, ...]:
        """The record of each part."""
        return tuple(
            Part(
                name,
                sums.work.flops,
                sums.work.arithmetic,
                sums.work.traffic,
                sums.host_to_device,
                sums.device_to_host,
                tuple(
                    Collective(*key, found["count"], found["nbytes"])
                    for key, found in sorted(sums.work.collectives.items())
                ),
                dict(sorted(sums.ops.items())),
                sums.device_bytes,
                sums.work.float8_flops,
                sums.disk_read,
                sums.disk_written,
            )
            for name, sums in self._sums.items()
        )


@dataclass
class _Places:
    """How often each step is executed, and how often for an entry on the device, or on disk."""

    all: Counter[Load | Store] = field(default_factory=Counter)
    resident: Counter[Load | Store] = field(default_factory=Counter)
    on_disk: Counter[Load | Store] = field(default_factory=Counter)

    @classmethod
    def of(cls, schedule: Schedule) -> _Places:
        """Those of a run."""
        found = cls()
        for (step, entry), count in accesses(schedule).items():
            found.all[step] += count
            if entry in step.buffer.residents:
                found.resident[step] += count
            elif entry >= step.buffer.entries - step.buffer.on_disk:
                found.on_disk[step] += count
        return found

    def fractions(self, step: Load | Store) -> tuple[float, float]:
        """Of a step's executions, those for entries on the device, and on disk."""
        count = self.all[step] or 1
        return self.resident[step] / count, self.on_disk[step] / count


def _size(routine: Routine, slot: Slot) -> int:
    spec = routine.specs[slot]
    return math.prod(spec.shape) * spec.dtype.itemsize
