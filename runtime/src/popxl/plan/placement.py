"""Which entries of remote buffers stay on the device: spare device memory as a cache of the host's.

Each kind of entry saves time by staying, as much as a simulated run shows, and takes memory. The
kinds that save most for each byte stay first, as many of their entries as there is room for; what
the host has no room for stays in any case. Results are the same bit for bit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from popxl._lower.lookahead import accesses
from popxl.plan.rates import Rates
from popxl.plan.timeline import Timeline

if TYPE_CHECKING:
    from popxl.plan.plan import Traced
    from popxl.remote_buffer import RemoteBuffer

MARGIN = 0.1  # of the device's memory, for what XLA takes beyond the estimate
_SMALL = 0.005  # of the room: kinds that stay without a simulation
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


@dataclass(eq=False)
class _Kind:
    """Entries alike, by index: those of one index stay together, such as a layer's."""

    label: str
    entries: dict[int, list[tuple[RemoteBuffer, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    saves: float = 0.0
    kept: set[int] = field(default_factory=set)

    def add(self, buffer: RemoteBuffer, index: int) -> None:
        self.entries[index].append((buffer, _entry_bytes(buffer)))

    def nbytes(self, indices: Iterable[int] | None = None) -> int:
        """Bytes of the entries of some indices, or of all."""
        chosen = self.entries if indices is None else indices
        return sum(n for i in chosen for _, n in self.entries[i])

    def count(self, indices: Iterable[int] | None = None) -> int:
        """Entries of some indices, or of all."""
        return sum(len(self.entries[i]) for i in (self.entries if indices is None else indices))

    def first(self, count: int) -> set[int]:
        """So many indices; the last may be on disk."""
        return set(sorted(self.entries)[:count])

    def fitting(self, room: int) -> set[int]:
        """As many indices as there is room for."""
        low, high = 0, len(self.entries)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.nbytes(self.first(middle)) <= room else (
                low, middle - 1)  # fmt: skip
        return self.first(low) if low else set()


def place(traced: Traced, rates: Rates, device: int, host: int | None = None) -> Placement:
    """Choose which entries of the program's remote buffers stay on the device, and set it.

    Args:
        device: bytes of a device's memory.
        host: bytes of host memory for the remote buffers of one replica; None: as many as needed.
    """
    kinds = _kinds(traced)
    _set(kinds)
    before = traced.timeline(rates)
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


def _kinds(traced: Traced) -> list[_Kind]:
    """All entries that a run moves, by kind of their buffer; those that many loads read apart."""
    crossings: dict[tuple[RemoteBuffer, int], int] = Counter()
    for (step, index), count in accesses(traced.schedule).items():
        crossings[step.buffer, index] += count
    kinds: dict[str, _Kind] = {}
    for (buffer, index), count in crossings.items():
        if index >= buffer.entries - buffer.on_disk:
            continue
        label = buffer.kind or f"buffer {buffer.remote_buffer_id}"
        label += " that many layers read" if count > _HOT else ""
        kinds.setdefault(label, _Kind(label)).add(buffer, index)
    return list(kinds.values())


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
        for index, entries in kind.entries.items():
            for buffer, _ in entries:
                chosen[buffer].update({index} if index in kind.kept else ())
    for buffer, indices in chosen.items():
        buffer.resident = indices


def _entry_bytes(buffer: RemoteBuffer) -> int:
    size = buffer.tensor_dtype.itemsize
    for d in buffer.tensor_shape:
        size *= d
    return size
