"""Mover of remote-buffer entries for hosts and devices that share memory: loads copy nothing.

It has the interface of `popxl._storage.prefetch.PrefetchMover`; `popxl._compile.platforms` chooses
one. A mover holds the entries until the run is finished, and pending arrays afterwards.
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


class BufferStorageProtocol(Protocol):
    """Methods of `popxl._storage.buffer_storage.BufferStorage` that movers of entries call."""

    def needs_transfer(self, index: Index) -> bool: ...

    def load(self, index: Index, donate: bool = False, copies: bool = False) -> Any: ...

    def store(self, index: Index, value: Any, copies: bool = False) -> None: ...

    def array(self, index: int) -> Any: ...

    def load_source_and_sharding(self, index: int, donate: bool) -> tuple[Any, Any]: ...

    def store_sharding(self, index: int) -> Any: ...

    def commit_store(self, index: int, array: Any) -> None: ...


def wait_until_ready(array: Any) -> None:
    """Waits until a JAX array is computed; returns at once if it was donated."""
    if not array.is_deleted():
        array.block_until_ready()


def is_ready(array: Any) -> bool:
    return array.is_deleted() or array.is_ready()


@dataclass
class InFlightArrays:
    """Dispatched arrays that may not be computed yet, limited in bytes.

    Attributes:
        limit: bytes on one replica; more are waited for.
        wait_seconds: seconds in all that were waited for them.
    """

    limit: int
    wait_seconds: float = 0.0
    _pending: deque[tuple[Any, int]] = field(default_factory=deque)
    _nbytes: int = 0

    def add(self, array: Any, nbytes: int) -> None:
        """Counts `nbytes` as in flight until `array` is ready; waits while over the limit."""
        self.release_ready()
        self._pending.append((array, nbytes))
        self._nbytes += nbytes
        while self._nbytes > self.limit and len(self._pending) > 1:
            oldest, size = self._pending.popleft()
            start = time.perf_counter()
            wait_until_ready(oldest)
            self.wait_seconds += time.perf_counter() - start
            self._nbytes -= size

    def release_ready(self) -> None:
        """Stops tracking dispatched arrays that are ready."""
        while self._pending and is_ready(self._pending[0][0]):
            self._nbytes -= self._pending.popleft()[1]

    def wait_all(self) -> None:
        """Waits for all pending arrays."""
        while self._pending:
            wait_until_ready(self._pending.popleft()[0])
        self._nbytes = 0


class SharedMemoryMover:
    """Loads and stores remote-buffer entries when the executor reaches the step, without prefetch.

    Attributes:
        wait_seconds: seconds that the host waited for arrays.
    """

    def __init__(
        self, entries: Mapping[RemoteBuffer, BufferStorageProtocol], in_flight: InFlightArrays
    ) -> None:
        self._entries, self._in_flight = entries, in_flight

    @property
    def wait_seconds(self) -> float:
        return self._in_flight.wait_seconds

    def load(self, step: Load, index: Index) -> Any:
        """Returns the array of a remote-buffer entry in device memory."""
        entries = self._entries[step.buffer]
        array = entries.load(index, step.donates, step.copies)
        if step.copies or entries.needs_transfer(index):
            self._in_flight.add(array, step.nbytes)
        return array

    def store(self, step: Store, index: Index, value: Any) -> None:
        """Stores an array to a remote-buffer entry."""
        self._entries[step.buffer].store(index, value, step.copies)

    def before_run(self, step: Run) -> None:
        """Called before the run of a compiled segment of the program is dispatched."""

    def after_run(self, step: Run, results: Sequence[Any]) -> None:
        """Counts the memory of a dispatched segment's results until they are computed."""
        if results:
            self._in_flight.add(results[0], step.segment.result_bytes)

    def wait_for_store(self, step: Store, index: Index) -> None:
        """Waits until the store of a remote-buffer entry has finished."""
        for i in set(index) if isinstance(index, tuple) else {index}:
            wait_until_ready(self._entries[step.buffer].array(i))

    def finish_run(self) -> None:
        """Called when all steps of a program's run are dispatched."""
        self._entries = {}
        self._in_flight.release_ready()

    def wait_all(self) -> None:
        """Does nothing: pending arrays are waited for through their `InFlightArrays`."""
