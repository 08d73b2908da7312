"""Entries that a run loads and stores, where host and device share their memory.

The movers of a run, this one and `popxl._storage.prefetch`, are asked alike;
`popxl._compile.platforms` chooses. A mover has the entries until the run is finished, and then only
what is on its way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from popxl._schedule.schedule import Load, Run, Store
    from popxl._storage.buffer_storage import Index
    from popxl.remote_buffer import RemoteBuffer


class EntriesOf(Protocol):
    """What is asked of the entries of a buffer: see `popxl._storage.buffer_storage.Entries`."""

    def travels(self, index: Index) -> bool: ...

    def load(self, index: Index, donate: bool = False, copies: bool = False) -> Any: ...

    def store(self, index: Index, value: Any, copies: bool = False) -> None: ...

    def array(self, index: int) -> Any: ...

    def departing(self, index: int, donate: bool) -> tuple[Any, Any]: ...

    def arriving(self, index: int) -> Any: ...

    def arrived(self, index: int, array: Any) -> None: ...


def wait_for(array: Any) -> None:
    """Wait until an array is there, unless it was given away."""
    if not array.is_deleted():
        array.block_until_ready()


def is_there(array: Any) -> bool:
    return array.is_deleted() or array.is_ready()


@dataclass
class InFlight:
    """Arrays that were asked for and may not be there yet: a window of bytes.

    Attributes:
        limit: bytes on one replica; more are waited for.
        waited: seconds in all that were waited for them.
    """

    limit: int
    waited: float = 0.0
    _pending: deque[tuple[Any, int]] = field(default_factory=deque)
    _nbytes: int = 0

    def add(self, array: Any, nbytes: int) -> None:
        """Note `nbytes` that are there when `array` is."""
        self.let_go()
        self._pending.append((array, nbytes))
        self._nbytes += nbytes
        while self._nbytes > self.limit and len(self._pending) > 1:
            oldest, size = self._pending.popleft()
            start = time.perf_counter()
            wait_for(oldest)
            self.waited += time.perf_counter() - start
            self._nbytes -= size

    def let_go(self) -> None:
        """Forget arrays that are there: they would keep their memory."""
        while self._pending and is_there(self._pending[0][0]):
            self._nbytes -= self._pending.popleft()[1]

    def settle(self) -> None:
        """Wait for all of them."""
        while self._pending:
            wait_for(self._pending.popleft()[0])
        self._nbytes = 0


class Direct:
    """Loads and stores entries in their place.

    Attributes:
        waited: seconds that the host waited for arrays.
    """

    def __init__(self, entries: Mapping[RemoteBuffer, EntriesOf], in_flight: InFlight) -> None:
        self._entries, self._in_flight = entries, in_flight

    @property
    def waited(self) -> float:
        return self._in_flight.waited

    def load(self, step: Load, index: Index) -> Any:
        """The entry on the device."""
        entries = self._entries[step.buffer]
        array = entries.load(index, step.donates, step.copies)
        if step.copies or entries.travels(index):
            self._in_flight.add(array, step.nbytes)
        return array

    def store(self, step: Store, index: Index, value: Any) -> None:
        """Make an array an entry."""
        self._entries[step.buffer].store(index, value, step.copies)

    def run(self, step: Run) -> None:
        """`step` is dispatched next."""

    def ran(self, step: Run, results: Sequence[Any]) -> None:
        """It was."""
        if results:
            self._in_flight.add(results[0], step.segment.result_bytes)

    def complete(self, step: Store, index: Index) -> None:
        """Wait until a store is done."""
        for i in set(index) if isinstance(index, tuple) else {index}:
            wait_for(self._entries[step.buffer].array(i))

    def finish(self) -> None:
        """The run has asked for everything."""
        self._entries = {}
        self._in_flight.let_go()

    def settle(self) -> None:
        """Wait for what is on its way: whoever has `InFlight` does."""
