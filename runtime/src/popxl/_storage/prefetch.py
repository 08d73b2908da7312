"""Prefetch mover: copies remote-buffer entries to the device ahead of the segments that use them.

On a GPU a copy to the device starts only after all compute that was dispatched before it, since
that compute can still use the memory (XLA's allocator reuses memory at dispatch). A load dispatched
where the program has it therefore overlaps nothing, however far the host runs ahead. So before each
run, the loads that follow it are dispatched, within a window of bytes, and never before an earlier
store to the same entry.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from popxl._schedule.schedule import Load, Run, Store
from popxl._storage.shared_memory_mover import BufferStorageProtocol, is_ready, wait_until_ready
from popxl.errors import add_error_location

if TYPE_CHECKING:
    from popxl._schedule.lookahead import LookaheadEvent
    from popxl._schedule.schedule import Index
    from popxl.remote_buffer import RemoteBuffer

_EVENTS = 4096  # steps that the look-ahead may be in front of the executor
_RUNS = 16  # that it passes at a time, while the device waits for the executor
Put = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


class PrefetchMover:
    """Loads and stores the remote-buffer entries of one run, loading ahead within a byte window.

    The counterpart of `SharedMemoryMover`.

    Args:
        put: moves arrays, all at once: `put(arrays, shardings) -> arrays`.
        window: bytes on one replica that may be on their way: loads that the executor has not
            reached, and stores that have not arrived. With 0, loads are dispatched in their place,
            and stores are not waited for.
        events: look-ahead of the run, from `popxl._schedule.lookahead.lookahead_events`.
    """

    wait_seconds = 0.0

    def __init__(
        self,
        events: Iterator[LookaheadEvent | None],
        entries: Mapping[RemoteBuffer, BufferStorageProtocol],
        put: Put,
        window: int,
    ) -> None:
        self._entries, self._put, self._window = entries, put, window
        self._events = events
        self._next: LookaheadEvent | None = None
        self._events_ahead = 0  # events that were looked at and not done
        self._dispatched_loads: deque[tuple[Load, Any]] = deque()
        self._dispatched_load_bytes = 0
        self._stores_ahead: Counter[tuple[RemoteBuffer, int]] = Counter()  # stores not done
        self._pending_stores: list[tuple[Store, int, Any, Any]] = []  # consecutive stores
        self._dispatched_stores: deque[tuple[Any, int]] = deque()
        self._dispatched_store_bytes = 0

    # ---- called by the executor ------------------------------------------------------------------
    def load(self, step: Load, index: Index) -> Any:
        """Returns the array of a remote-buffer entry in device memory."""
        self.dispatch_stores()
        if not self._advance_executor(step):  # it could not be dispatched ahead
            self._dispatch_consecutive_loads()
            self._events_ahead -= 1
        if not self._entries[step.buffer].needs_transfer(index) or isinstance(index, tuple):
            return self._entries[step.buffer].load(index, step.donates, step.copies)
        expected, array = self._dispatched_loads.popleft()
        assert expected is step
        self._dispatched_load_bytes -= step.nbytes
        return array

    def store(self, step: Store, index: Index, value: Any) -> None:
        """Stores an array to a remote-buffer entry."""
        if self._advance_executor(step):
            for key in _entry_keys(step, index):
                self._stores_ahead[key] -= 1
        else:
            self._take_event()
            self._events_ahead -= 1
        if isinstance(index, tuple) or not self._entries[step.buffer].needs_transfer(index):
            self.dispatch_stores()
            self._entries[step.buffer].store(index, value, step.copies)
        else:
            to = self._entries[step.buffer].store_sharding(index)
            self._pending_stores.append((step, index, value, to))

    def before_run(self, step: Run) -> None:
        """Dispatches pending stores, and the loads that can overlap with the next segment run."""
        self.dispatch_stores()
        if not self._advance_executor(step):
            self._take_event()
            self._events_ahead -= 1
        if self._window:
            self._dispatch_next_loads()

    def after_run(self, step: Run, results: Sequence[Any]) -> None:
        """Called after the run of a compiled segment of the program was dispatched."""

    def wait_for_store(self, step: Store, index: Index) -> None:
        """Waits until the store of a remote-buffer entry has finished."""
        self.dispatch_stores()
        for i in set(index) if isinstance(index, tuple) else {index}:
            wait_until_ready(self._entries[step.buffer].array(i))

    def finish_run(self) -> None:
        """Dispatches pending stores, and releases arrays that are ready."""
        self.dispatch_stores()
        self._entries = {}
        self._release_stored()

    def wait_all(self) -> None:
        """Waits for all stores of remote-buffer entries."""
        while self._dispatched_stores:
            self._wait_for_oldest()

    # ---- order ----------------------------------------------------------------------------------
    def _advance_executor(self, step: Load | Store | Run) -> bool:
        """Moves the executor's position to a step; True if prefetching is past it already."""
        if self._events_ahead:
            self._events_ahead -= 1
            return True
        event = self._peek_event()
        assert event is not None
        assert event.step is step, "the look-ahead has lost the executor's order"
        return False

    def _peek_event(self) -> LookaheadEvent | None:
        """Returns the next upcoming load, store or segment run; None if unknown or at the end."""
        if self._next is None:
            self._next = next(self._events, None)
        return self._next

    def _take_event(self) -> None:
        self._next = None
        self._events_ahead += 1

    # ---- loads ----------------------------------------------------------------------------------
    def _dispatch_next_loads(self) -> None:
        """Dispatches the next loads in one transfer, as far as the prefetch window allows."""
        batch: list[tuple[Load, int]] = []
        runs_passed = 0
        while (
            self._events_ahead < _EVENTS
            and runs_passed < _RUNS
            and (event := self._peek_event()) is not None
        ):
            step, index = event
            if isinstance(step, Run):
                runs_passed += 1
            elif isinstance(step, Store):
                self._stores_ahead.update(_entry_keys(step, index))
            elif isinstance(step, Load) and self._entries[step.buffer].needs_transfer(index):
                if isinstance(index, tuple) or self._stores_ahead[step.buffer, index]:
                    break
                if not self._fits_window(step.nbytes):
                    break
                batch.append((step, index))
                self._dispatched_load_bytes += step.nbytes
            self._take_event()
        self._dispatch_loads(batch)

    def _dispatch_consecutive_loads(self) -> None:
        """Dispatches the next load and the loads that directly follow it."""
        batch: list[tuple[Load, int]] = []
        while (event := self._peek_event()) is not None and isinstance(event.step, Load):
            step, index = event.step, event.entry_index
            if isinstance(index, tuple):
                if not self._events_ahead:
                    self._take_event()
                break
            if self._entries[step.buffer].needs_transfer(index):
                batch.append((step, index))
                self._dispatched_load_bytes += step.nbytes
            self._take_event()
        self._dispatch_loads(batch)

    def _dispatch_loads(self, batch: Sequence[tuple[Load, int]]) -> None:
        if not batch:
            return
        sources = [self._load_source(step, index) for step, index in batch]
        arrays = self._put([array for array, _ in sources], [to for _, to in sources])
        self._dispatched_loads.extend((step, a) for (step, _), a in zip(batch, arrays, strict=True))

    def _load_source(self, step: Load, index: int) -> tuple[Any, Any]:
        try:
            return self._entries[step.buffer].load_source_and_sharding(index, step.donates)
        except Exception as error:  # the executor is not there yet
            add_error_location(error, f"load entry {index}", step.location)
            raise

    def _fits_window(self, nbytes: int) -> bool:
        """True if the prefetch window has room for another load of `nbytes`.

        Loads can always use half of it; stores that take more are waited for.
        """
        self._release_stored()
        while (
            self._dispatched_stores
            and self._dispatched_load_bytes + nbytes + self._dispatched_store_bytes > self._window
            and self._dispatched_load_bytes + nbytes <= self._window // 2
        ):
            self._wait_for_oldest()
        return self._dispatched_load_bytes + nbytes + self._dispatched_store_bytes <= self._window

    # ---- stores ---------------------------------------------------------------------------------
    def dispatch_stores(self) -> None:
        """Dispatches the pending stores of remote-buffer entries in one transfer."""
        if not self._pending_stores:
            return
        pending, self._pending_stores = self._pending_stores, []
        arrays = self._put([value for *_, value, _ in pending], [to for *_, to in pending])
        for (step, index, *_), array in zip(pending, arrays, strict=True):
            self._entries[step.buffer].commit_store(index, array)
            self._dispatched_stores.append((array, step.nbytes))
            self._dispatched_store_bytes += step.nbytes
        while self._dispatched_store_bytes > self._window > 0 and len(self._dispatched_stores) > 1:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        array, nbytes = self._dispatched_stores.popleft()
        wait_until_ready(array)
        self._dispatched_store_bytes -= nbytes

    def _release_stored(self) -> None:
        """Drops the arrays of remote-buffer entries whose store has finished."""
        while self._dispatched_stores and is_ready(self._dispatched_stores[0][0]):
            self._dispatched_store_bytes -= self._dispatched_stores.popleft()[1]


def _entry_keys(step: Store, index: Index) -> list[tuple[RemoteBuffer, int]]:
    indices = set(index) if isinstance(index, tuple) else {index}
    return [(step.buffer, i) for i in indices]
