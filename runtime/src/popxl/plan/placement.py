"""Which entries of remote buffers stay on the device: spare device memory as a cache of the host's.

Each kind of entry saves time by staying, as much as a simulated run shows, and takes memory. The
kinds that save most for each byte stay first, as many of their entries as there is room for; what
the host has no room for stays in any case. Where a kind does not fit as a whole, entries of the
parts that wait longest for each byte stay first; among layers alike, those that stay are spread
evenly, so that each layer's compute hides transfers. Results are the same bit for bit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from popxl._lower.lookahead import accesses
from popxl._lower.schedule import Routine, Transfer, calls
from popxl.plan.rates import Rates
from popxl.plan.timeline import Timeline

if TYPE_CHECKING:
    from popxl.plan.plan import Traced
    from popxl.remote_buffer import RemoteBuffer

MARGIN = 0.1  # of the device's memory, for what XLA takes beyond the estimate
_SMALL = 0.005  # of the room: kinds that stay without a simulation
_GOLDEN = (5**0.5 - 1) / 2  # the first multiples of it, modulo 1, are spread evenly
_HOT = 8  # crossings of the host link a run: entries that many loads read


@dataclass(frozen=True)
class Kept:
    """A kind of entry.

    Attributes:
        label: of the buffers (`RemoteBuffer.kind`).
        entries, of: how many stay on the device, of how many there are.
        nbytes: bytes of those that stay, on one replica.
        saves: seconds of a run that all of them would save by staying, alone; 0 where there was no
            need to find out.
    """

    label: str
    entries: int
    of: int
    nbytes: int
    saves: float


@dataclass(frozen=True)
class Placement:
    """Where entries live, and why.

    Attributes:
        kinds: those that save most for each byte first.
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


_Place = tuple[float, int]
"""How much the parts wait that an entry is loaded for, seconds a byte, and the entry's index."""


@dataclass(eq=False)
class _Kind:
    """Entries alike, by place: those of one place stay together, such as a layer's."""

    label: str
    entries: dict[_Place, list[tuple[RemoteBuffer, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    saves: float = 0.0
    kept: set[_Place] = field(default_factory=set)

    def add(self, buffer: RemoteBuffer, index: int, waits: float) -> None:
        self.entries[waits, index].append((buffer, _entry_bytes(buffer)))

    def nbytes(self, places: Iterable[_Place] | None = None) -> int:
        """Bytes of the entries of some places, or of all."""
        chosen = self.entries if places is None else places
        return sum(n for i in chosen for _, n in self.entries[i])

    def count(self, places: Iterable[_Place] | None = None) -> int:
        """Entries of some places, or of all."""
        return sum(len(self.entries[i]) for i in (self.entries if places is None else places))

    def fitting(self, room: int) -> set[_Place]:
        """As many places as there is room for, in the order in which they should stay."""
        order = sorted(self.entries, key=lambda at: (-at[0], at[1] * _GOLDEN % 1))
        ends = accumulate(self.nbytes([at]) for at in order)
        return {at for at, end in zip(order, ends, strict=True) if end <= room}


def place(traced: Traced, rates: Rates, device: int, host: int | None = None) -> Placement:
    """Choose which entries of the program's remote buffers stay on the device, and set it.

    Args:
        device: bytes of a device's memory.
        host: bytes of host memory for the remote buffers of one replica; None: as many as needed.
    """
    for buffer in traced.ir.remote_buffers:
        buffer.resident = 0
    before = traced.timeline(rates)
    kinds = _kinds(traced, before)
    everything = sum(kind.nbytes() for kind in kinds)
    room = int(device * (1 - MARGIN)) - before.peak - traced.plan().on_device
    if everything > room:
        kinds = _by_gain(kinds, room, before.seconds, lambda: traced.timeline(rates).seconds)
    left, over = room, everything - (everything if host is None else host)
    for kind in kinds:
        if kind.saves >= 0 or over > 0 or everything <= room:
            kind.kept = kind.fitting(max(left, 0))
            left -= kind.nbytes(kind.kept)
            over -= kind.nbytes(kind.kept)
    _set(kinds)
    found = [
        Kept(kind.label, kind.count(kind.kept), kind.count(), kind.nbytes(kind.kept), kind.saves)
        for kind in kinds
    ]
    return Placement(found, before, traced.timeline(rates), room)


def _kinds(traced: Traced, before: Timeline) -> list[_Kind]:
    """All entries that a run moves, by kind of their buffer; those that many loads read apart."""
    crossings: dict[tuple[RemoteBuffer, int], int] = Counter()
    for (step, index), count in accesses(traced.schedule).items():
        crossings[step.buffer, index] += count
    waits = _waits(traced, before)
    kinds: dict[str, _Kind] = {}
    for (buffer, index), count in crossings.items():
        if index >= buffer.entries - buffer.on_disk:
            continue
        label = buffer.kind or f"buffer {buffer.remote_buffer_id}"
        label += " that many layers read" if count > _HOT else ""
        kinds.setdefault(label, _Kind(label)).add(buffer, index, waits[buffer])
    return list(kinds.values())


def _waits(traced: Traced, before: Timeline) -> dict[RemoteBuffer, float]:
    """For each buffer, how long the parts that use it wait for transfers, in seconds a byte.

    Args:
        before: a run with all entries in host memory.
    """
    moved = {part.name: part.host_to_device + part.device_to_host for part in traced.plan().parts}
    return {
        buffer: sum(before.exposed[part].transfers for part in parts if part in before.exposed)
        / max(sum(moved.get(part, 0) for part in parts), 1)
        for buffer, parts in _parts_of(traced.schedule.main).items()
    }


def _parts_of(main: Routine) -> dict[RemoteBuffer, set[str]]:
    """The parts of the program that move entries of each buffer."""
    found: dict[RemoteBuffer, set[str]] = defaultdict(set)
    waiting, seen = [(main, "")], set[tuple[Routine, str]]()
    while waiting:
        routine, part = waiting.pop()
        seen.add((routine, part))
        for step in routine.steps:
            if isinstance(step, Transfer):
                found[step.buffer].add(step.part or part)
            inner = [(passed.routine, step.part or part) for passed in calls(step)]
            waiting += [each for each in inner if each not in seen]
    return found


def _by_gain(
    kinds: Sequence[_Kind], room: int, before: float, measure: Callable[[], float]
) -> list[_Kind]:
    """Kinds in the order in which they should stay: those that save most for each byte first, but
    for small ones."""
    small = [kind for kind in kinds if kind.nbytes() < _SMALL * room]
    large = [kind for kind in kinds if kind not in small]
    for kind in large:
        kind.saves = before - _alone(kinds, kind, measure)
    return [*small, *sorted(large, key=lambda kind: -kind.saves / kind.nbytes())]


def _alone(kinds: Sequence[_Kind], kind: _Kind, measure: Callable[[], float]) -> float:
    """What is measured where all entries of one kind stay, and no others."""
    kind.kept = set(kind.entries)
    _set(kinds)
    found = measure()
    kind.kept = set()
    return found


def _set(kinds: Sequence[_Kind]) -> None:
    chosen: Mapping[RemoteBuffer, set[int]] = defaultdict(set)
    for kind in kinds:
        for place, entries in kind.entries.items():
            for buffer, _ in entries:
                chosen[buffer].update({place[1]} if place in kind.kept else ())
    for buffer, indices in chosen.items():
        buffer.resident = indices


def _entry_bytes(buffer: RemoteBuffer) -> int:
    size = buffer.tensor_dtype.itemsize
    for d in buffer.tensor_shape:
        size *= d
    return size
