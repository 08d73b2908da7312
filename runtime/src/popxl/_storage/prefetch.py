"""Entries on their way between the host's memory and the device's.

On a GPU a copy to the device starts only after all compute that was dispatched before it, since
the memory it goes to may still be in use by that (XLA's allocator hands it out at dispatch). A load
that is dispatched where it stands in the program therefore overlaps nothing, however far the host
runs ahead. So before each run the loads are dispatched that come after it, within a window of
bytes, and never before a store to the same entry that precedes them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from popxl._schedule.schedule import Load, Run, Store
from popxl._storage.in_place_mover import EntriesOf, is_there, wait_for
from popxl.errors import locate

if TYPE_CHECKING:
    from popxl._schedule.lookahead import Event
    from popxl._schedule.schedule import Index
    from popxl.remote_buffer import RemoteBuffer

_EVENTS = 4096  # steps that the look-ahead may be in front of the walker
_RUNS = 16  # that it passes at a time, while the device waits for the walker
Put = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


class Transit:
    """The loads and stores of one run of a program, some of them ahead of their turn; see
    `popxl._storage.in_place_mover.Direct`.

    Args:
        put: moves arrays, all at once: `put(arrays, shardings) -> arrays`.
        window: bytes on one replica that may be on their way: loads that the walker has not
            reached, and stores that have not arrived. With 0, loads are dispatched in their place,
            and stores are not waited for.
        coming: what the walker will do, from `popxl._schedule.lookahead.upcoming`.
    """

    waited = 0.0

    def __init__(
        self,
        coming: Iterator[Event | None],
        entries: Mapping[RemoteBuffer, EntriesOf],
        put: Put,
        window: int,
    ) -> None:
        self._entries, self._put, self._window = entries, put, window
        self._upcoming = coming
        self._next: Event | None = None
        self._lead = 0  # events that were looked at and not done
        self._loads: deque[tuple[Load, Any]] = deque()
        self._loads_nbytes = 0
        self._unstored: Counter[tuple[RemoteBuffer, int]] = Counter()  # stores not done
        self._leaving: list[tuple[Store, int, Any, Any]] = []  # consecutive stores
        self._stores: deque[tuple[Any, int]] = deque()
        self._stores_nbytes = 0

    # ---- what the walker does -------------------------------------------------------------------
    def load(self, step: Load, index: Index) -> Any:
        """The entry on the device."""
        self.send()
        if not self._reached(step):  # it could not be dispatched ahead
            self._fetch_consecutive()
            self._lead -= 1
        if not self._entries[step.buffer].travels(index) or isinstance(index, tuple):
            return self._entries[step.buffer].load(index, step.donates, step.copies)
        asked, array = self._loads.popleft()
        assert asked is step
        self._loads_nbytes -= step.nbytes
        return array

    def store(self, step: Store, index: Index, value: Any) -> None:
        """Make an array an entry."""
        if self._reached(step):
            for key in _keys(step, index):
                self._unstored[key] -= 1
        else:
            self._advance()
            self._lead -= 1
        if isinstance(index, tuple) or not self._entries[step.buffer].travels(index):
            self.send()
            self._entries[step.buffer].store(index, value, step.copies)
        else:
            to = self._entries[step.buffer].arriving(index)
            self._leaving.append((step, index, value, to))

    def run(self, step: Run) -> None:
        """Dispatch what `step`, which is dispatched next, can hide."""
        self.send()
        if not self._reached(step):
            self._advance()
            self._lead -= 1
        if self._window:
            self._look_ahead()

    def ran(self, step: Run, results: Sequence[Any]) -> None:
        """`step` was dispatched."""

    def complete(self, step: Store, index: Index) -> None:
        """Wait until a store is done."""
        self.send()
        for i in set(index) if isinstance(index, tuple) else {index}:
            wait_for(self._entries[step.buffer].array(i))

    def finish(self) -> None:
        """Dispatch what is left, and let go of what has arrived."""
        self.send()
        self._entries = {}
        self._let_go()

    def settle(self) -> None:
        """Wait for all stores."""
        while self._stores:
            self._wait_for_oldest()

    # ---- order ----------------------------------------------------------------------------------
    def _reached(self, step: Load | Store | Run) -> bool:
        """Note that the walker is at `step`; whether the look-ahead has been there."""
        if self._lead:
            self._lead -= 1
            return True
        event = self._peek()
        assert event is not None
        assert event.step is step, "the look-ahead has lost the walker's order"
        return False

    def _peek(self) -> Event | None:
        """The first event that was not looked at; None: unknown, or there is none."""
        if self._next is None:
            self._next = next(self._upcoming, None)
        return self._next

    def _advance(self) -> None:
        self._next = None
        self._lead += 1

    # ---- loads ----------------------------------------------------------------------------------
    def _look_ahead(self) -> None:
        """Dispatch the loads that come next, in one transfer, as far as the window allows."""
        batch: list[tuple[Load, int]] = []
        passed = 0
        while self._lead < _EVENTS and passed < _RUNS and (event := self._peek()) is not None:
            step, index = event
            if isinstance(step, Run):
                passed += 1
            elif isinstance(step, Store):
                self._unstored.update(_keys(step, index))
            elif isinstance(step, Load) and self._entries[step.buffer].travels(index):
                if isinstance(index, tuple) or self._unstored[step.buffer, index]:
                    break
                if not self._has_room(step.nbytes):
                    break
                batch.append((step, index))
                self._loads_nbytes += step.nbytes
            self._advance()
        self._bring(batch)

    def _fetch_consecutive(self) -> None:
        """Dispatch the next load and those that follow it before any run or store."""
        batch: list[tuple[Load, int]] = []
        while (event := self._peek()) is not None and isinstance(event.step, Load):
            step, index = event.step, event.entry
            if isinstance(index, tuple):
                if not self._lead:
                    self._advance()
                break
            if self._entries[step.buffer].travels(index):
                batch.append((step, index))
                self._loads_nbytes += step.nbytes
            self._advance()
        self._bring(batch)

    def _bring(self, batch: Sequence[tuple[Load, int]]) -> None:
        if not batch:
            return
        departing = [self._departing(step, index) for step, index in batch]
        arrays = self._put([array for array, _ in departing], [to for _, to in departing])
        self._loads.extend((step, a) for (step, _), a in zip(batch, arrays, strict=True))

    def _departing(self, step: Load, index: int) -> tuple[Any, Any]:
        try:
            return self._entries[step.buffer].departing(index, step.donates)
        except Exception as error:  # the walker is not there yet
            locate(error, f"load entry {index}", step.location)
            raise

    def _has_room(self, nbytes: int) -> bool:
        """Whether the window takes another load. Loads may always have half of it; stores that
        take more are waited for."""
        self._let_go()
        while (
            self._stores
            and self._loads_nbytes + nbytes + self._stores_nbytes > self._window
            and self._loads_nbytes + nbytes <= self._window // 2
        ):
            self._wait_for_oldest()
        return self._loads_nbytes + nbytes + self._stores_nbytes <= self._window

    # ---- stores ---------------------------------------------------------------------------------
    def send(self) -> None:
        """Dispatch the stores that wait, in one transfer."""
        if not self._leaving:
            return
        leaving, self._leaving = self._leaving, []
        arrays = self._put([value for *_, value, _ in leaving], [to for *_, to in leaving])
        for (step, index, *_), array in zip(leaving, arrays, strict=True):
            self._entries[step.buffer].arrived(index, array)
            self._stores.append((array, step.nbytes))
            self._stores_nbytes += step.nbytes
        while self._stores_nbytes > self._window > 0 and len(self._stores) > 1:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        array, nbytes = self._stores.popleft()
        wait_for(array)
        self._stores_nbytes -= nbytes

    def _let_go(self) -> None:
        """Forget stores that have arrived."""
        while self._stores and is_there(self._stores[0][0]):
            self._stores_nbytes -= self._stores.popleft()[1]


def _keys(step: Store, index: Index) -> list[tuple[RemoteBuffer, int]]:
    indices = set(index) if isinstance(index, tuple) else {index}
    return [(step.buffer, i) for i in indices]
