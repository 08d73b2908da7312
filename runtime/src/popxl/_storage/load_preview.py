"""Text preview of prefetching: the remote-buffer loads dispatched before each segment run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from popxl._schedule.lookahead import static_events
from popxl._schedule.schedule import Load, Run, Schedule, Store
from popxl._storage.prefetch import PrefetchMover

if TYPE_CHECKING:
    from popxl._schedule.schedule import Index
    from popxl.remote_buffer import RemoteBuffer


def format_prefetch_counts(schedule: Schedule) -> Mapping[Run, str]:
    """Returns, for each segment run, the mean number of loads prefetched before it, as text.

    Stores are taken to finish at once.
    """
    mover = _RecordingMover(schedule)
    title = {step: routine.title for routine in schedule.routines for step in routine.steps}
    prefetched: dict[Run, Counter[str]] = defaultdict(Counter)
    times: Counter[Run] = Counter()
    for step, entry in filter(None, static_events(schedule)):
        match step:
            case Load():
                mover.load(step, entry)
            case Store():
                mover.store(step, entry, _READY)
            case Run():
                mover.dispatched.clear()
                mover.before_run(step)
                times[step] += 1
                prefetched[step].update(load.part or title[load] for load in mover.dispatched)
    return {run: _format_loads(loads, times[run]) for run, loads in prefetched.items() if loads}


def _format_loads(loads: Counter[str], num_runs: int) -> str:
    counts = (f"{count / num_runs:.2g} for {name}" for name, count in loads.items())
    return f"loads ahead: {', '.join(counts)}"


class _RecordingMover(PrefetchMover):
    """Mover that records in `dispatched` which remote-buffer loads it dispatches."""

    def __init__(self, schedule: Schedule) -> None:
        buffers = {step.buffer for r in schedule.routines for step in r.steps
                   if isinstance(step, (Load, Store))}  # fmt: skip
        entries = {buffer: _SimulatedStorage(buffer) for buffer in buffers}
        window = schedule.window or 0
        events = filter(None, static_events(schedule))
        super().__init__(events, entries, lambda arrays, _: arrays, window)
        self.dispatched: list[Load] = []

    def _dispatch_loads(self, batch: Sequence[tuple[Load, int]]) -> None:
        self.dispatched += [load for load, _ in batch]
        super()._dispatch_loads(batch)


class _ReadyArray:
    """Stand-in for a JAX array that is computed already."""

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return True


_READY = _ReadyArray()


class _SimulatedStorage:
    """Remote-buffer storage without values, to simulate transfers (`BufferStorageProtocol`)."""

    def __init__(self, buffer: RemoteBuffer) -> None:
        self._resident = buffer.resident_entries

    def needs_transfer(self, index: Index) -> bool:
        return isinstance(index, tuple) or index not in self._resident

    def load(self, index: Index, donates: bool = False, copies: bool = False) -> Any:
        return _READY

    def store(self, index: Index, value: Any, copies: bool = False) -> None:
        pass

    def array(self, index: int) -> Any:
        return _READY

    def load_source_and_sharding(self, index: int, donates: bool) -> tuple[Any, Any]:
        return _READY, None

    def store_sharding(self, index: int) -> Any:
        return None

    def commit_store(self, index: int, array: Any) -> None:
        pass
