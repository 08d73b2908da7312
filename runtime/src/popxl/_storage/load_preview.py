"""Which loads are dispatched before which runs, as text: a walk that moves nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from popxl._schedule.lookahead import expected
from popxl._schedule.schedule import Load, Run, Schedule, Store
from popxl._storage.prefetch import Transit

if TYPE_CHECKING:
    from popxl._schedule.schedule import Index
    from popxl.remote_buffer import RemoteBuffer


def loads_ahead(schedule: Schedule) -> Mapping[Run, str]:
    """What is dispatched before a run and is for later ones, on average over a run of the program
    whose stores arrive at once."""
    transit = _Transit(schedule)
    title = {step: routine.title for routine in schedule.routines for step in routine.steps}
    before: dict[Run, Counter[str]] = defaultdict(Counter)
    times: Counter[Run] = Counter()
    for step, entry in filter(None, expected(schedule)):
        match step:
            case Load():
                transit.load(step, entry)
            case Store():
                transit.store(step, entry, _HERE)
            case Run():
                transit.moved.clear()
                transit.run(step)
                times[step] += 1
                before[step].update(load.part or title[load] for load in transit.moved)
    return {run: _text(loads, times[run]) for run, loads in before.items() if loads}


def _text(loads: Counter[str], times: int) -> str:
    each = (f"{count / times:.2g} for {name}" for name, count in loads.items())
    return f"loads ahead: {', '.join(each)}"


class _Transit(Transit):
    """Notes the loads that it dispatches in `moved`."""

    def __init__(self, schedule: Schedule) -> None:
        buffers = {step.buffer for r in schedule.routines for step in r.steps
                   if isinstance(step, (Load, Store))}  # fmt: skip
        entries = {buffer: _Entries(buffer) for buffer in buffers}
        window = schedule.window or 0
        events = filter(None, expected(schedule))
        super().__init__(events, entries, lambda arrays, _: arrays, window)
        self.moved: list[Load] = []

    def _bring(self, batch: Sequence[tuple[Load, int]]) -> None:
        self.moved += [load for load, _ in batch]
        super()._bring(batch)


class _Here:
    """Stands for an array that is there."""

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return True


_HERE = _Here()


class _Entries:
    """Entries of a buffer, without values; see `popxl._storage.in_place_mover.EntriesOf`."""

    def __init__(self, buffer: RemoteBuffer) -> None:
        self._resident = buffer.resident_entries

    def travels(self, index: Index) -> bool:
        return isinstance(index, tuple) or index not in self._resident

    def load(self, index: Index, donates: bool = False, copies: bool = False) -> Any:
        return _HERE

    def store(self, index: Index, value: Any, copies: bool = False) -> None:
        pass

    def array(self, index: int) -> Any:
        return _HERE

    def departing(self, index: int, donates: bool) -> tuple[Any, Any]:
        return _HERE, None

    def arriving(self, index: int) -> Any:
        return None

    def arrived(self, index: int, array: Any) -> None:
        pass
