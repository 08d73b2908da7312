"""Which entries of remote buffers stay on the device: spare device memory as a cache of the host's.

A simulated run shows which parts of the program wait for transfers, and how long. Entries that
these parts load stay on the device, as many bytes as would have crossed the host link in that time,
those first that several of them load. Then the run is simulated again, until nothing waits or the
room is taken; what is left of it goes to entries that cross the link most often. Among entries
alike those that stay are spread evenly, so that each layer's compute hides the transfers of the
rest. Results are the same bit for bit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from popxl._lower.lookahead import accesses
from popxl._lower.schedule import Load, Routine, Store, calls
from popxl.plan.rates import Rates
from popxl.plan.timeline import Timeline

if TYPE_CHECKING:
    from popxl.plan.plan import Traced
    from popxl.remote_buffer import RemoteBuffer

MARGIN = 0.1  # of the device's memory, for what XLA takes beyond the estimate
_SMALL = 2**20  # bytes of an entry that stays if there is room: moving it is mostly latency
_ROUNDS = 5
_WORTH = 0.005  # of a run: so little waiting is not looked at again
_GOLDEN = (5**0.5 - 1) / 2  # the first multiples of it, modulo 1, are spread evenly


@dataclass(frozen=True)
class Kept:
    """A kind of entry.

    Attributes:
        label: of the buffers (`RemoteBuffer.kind`).
        entries, of: how many stay on the device, of how many there are.
        nbytes: bytes of those that stay, on one replica.
    """

    label: str
    entries: int
    of: int
    nbytes: int


@dataclass(frozen=True)
class Placement:
    """Where entries live, and why.

    Attributes:
        kinds: those of which most bytes stay first.
        before, after: simulated runs with all entries in host memory, and as placed.
        room: device bytes for entries of remote buffers.
    """

    kinds: Sequence[Kept]
    before: Timeline
    after: Timeline
    room: int

    @property
    def nbytes(self) -> int:
        """Bytes of entries that stay on the device."""
        return sum(kind.nbytes for kind in self.kinds)


@dataclass(eq=False)
class _Entry:
    """An entry that a run moves.

    Attributes:
        rank: among entries alike, the lowest is first.
        loads: how often, by part of the program.
        crossings: loads and stores.
    """

    buffer: RemoteBuffer
    index: int
    nbytes: int
    rank: float
    loads: Counter[str] = field(default_factory=Counter)
    crossings: int = 0


def place(traced: Traced, rates: Rates, device: int, spread: bool = True) -> Placement:
    """Choose which entries of the program's remote buffers stay on the device, and set it.

    Args:
        device: bytes of a device's memory.
        spread: spread those that stay evenly over a buffer. False: the first stay; for a program
            whose last entries are to be on disk.
    """
    for buffer in traced.ir.remote_buffers:
        buffer.resident = 0
    entries = _entries(traced, spread)
    before = after = traced.timeline(rates)
    room = int(device * (1 - MARGIN)) - before.peak - traced.plan().on_device
    resident = _OnDevice(entries, room)
    resident.take(sorted(entries, key=lambda e: (e.nbytes > _SMALL, -e.crossings)), _SMALL)
    fits = sum(entry.nbytes for entry in entries) <= room
    for _ in range(0 if fits else _ROUNDS):
        if not resident.serve(after, rates):
            break
        resident.set()
        after = traced.timeline(rates)
    resident.take(sorted(entries, key=lambda e: (-e.crossings, e.rank)))
    resident.set()
    return Placement(resident.kinds(), before, traced.timeline(rates), room)


class _OnDevice:
    """The entries that stay, while they are chosen."""

    def __init__(self, entries: Sequence[_Entry], room: int) -> None:
        self._entries, self._left = entries, room
        self._kept: set[_Entry] = set()

    def take(self, entries: Iterable[_Entry], largest: int | None = None) -> None:
        """Let those stay for which there is room.

        Args:
            largest: bytes of the largest one that may.
        """
        for entry in entries:
            if largest is None or entry.nbytes <= largest:
                self._take(entry)

    def _take(self, entry: _Entry) -> bool:
        if entry in self._kept or entry.nbytes > self._left:
            return False
        self._kept.add(entry)
        self._left -= entry.nbytes
        return True

    def serve(self, run: Timeline, rates: Rates) -> bool:
        """Let entries stay for which parts of a run wait; whether any were chosen."""
        if run.exposed_transfers < _WORTH * run.seconds:
            return False
        wanted = {part: found.transfers * rates.host_link for part, found in run.exposed.items()}
        worth = {e: sum(n for part, n in e.loads.items() if wanted.get(part, 0) > 0)
                 for e in self._entries}  # fmt: skip
        chosen = False
        for entry in sorted(self._entries, key=lambda e: (-worth[e], -e.crossings, e.rank)):
            waiting = [part for part in entry.loads if wanted.get(part, 0) > 0]
            if waiting and self._take(entry):
                chosen = True
                for part in waiting:
                    wanted[part] -= entry.nbytes * entry.loads[part]
        return chosen

    def set(self) -> None:
        """Let the program know."""
        found: dict[RemoteBuffer, set[int]] = {e.buffer: set() for e in self._entries}
        for entry in self._kept:
            found[entry.buffer].add(entry.index)
        for buffer, indices in found.items():
            buffer.resident = indices

    def kinds(self) -> list[Kept]:
        """What stays, by kind of buffer."""
        by_label: dict[str, list[_Entry]] = defaultdict(list)
        for entry in self._entries:
            buffer = entry.buffer
            by_label[buffer.kind or f"buffer {buffer.remote_buffer_id}"].append(entry)
        found = []
        for label, entries in by_label.items():
            kept = [e for e in entries if e in self._kept]
            found.append(Kept(label, len(kept), len(entries), sum(e.nbytes for e in kept)))
        return sorted(found, key=lambda kind: -kind.nbytes)


def _entries(traced: Traced, spread: bool) -> list[_Entry]:
    """All entries that a run moves, but for those on disk."""
    found: dict[tuple[RemoteBuffer, int], _Entry] = {}
    parts = _parts_of(traced.schedule.main)
    for (step, index), count in accesses(traced.schedule).items():
        buffer = step.buffer
        if index >= buffer.entries - buffer.on_disk:
            continue
        rank = index * _GOLDEN % 1 if spread else index
        entry = found.setdefault((buffer, index), _Entry(buffer, index, step.nbytes, rank))
        entry.crossings += count
        if isinstance(step, Load):
            for part in parts[step]:
                entry.loads[part] += count
    return list(found.values())


def _parts_of(main: Routine) -> Mapping[Load | Store, set[str]]:
    """The parts of the program that each transfer belongs to."""
    found: dict[Load | Store, set[str]] = defaultdict(set)
    waiting, seen = [(main, "")], set[tuple[Routine, str]]()
    while waiting:
        routine, part = waiting.pop()
        if (routine, part) in seen:
            continue
        seen.add((routine, part))
        for step in routine.steps:
            if isinstance(step, (Load, Store)):
                found[step].add(step.part or part)
            waiting += [(passed.routine, step.part or part) for passed in calls(step)]
    return found
