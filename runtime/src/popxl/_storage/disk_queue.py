"""Entries on disk while a program runs: written behind its back, and read ahead of it.

A store hands an array to a thread, and a load of what is not written yet takes that array. Threads
read what comes next (`popxl._schedule.lookahead`), within a number of bytes. The memory of what is
written takes what is read (`popxl._storage.entry_memory`).

The thread that walks owns the order of events; of several that share a folder one walks at a time.
They and the folder's threads share what waits to be written and what is read ahead, under
`Traffic.changed`. After a run nothing is read ahead; what waits to be written stays until it is.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol

import jax
import numpy as np

from popxl._devices import forks
from popxl._devices.cpu import Recycled
from popxl._ir.debug_flags import STEPWISE, is_on
from popxl._schedule.schedule import Load, Run, Store
from popxl._storage.scratch_files import Scratch, requests_of, slot_of

if TYPE_CHECKING:
    from popxl._schedule.lookahead import Event
    from popxl._schedule.schedule import Index
    from popxl._storage.entry_memory import EntryMemory
    from popxl.remote_buffer import RemoteBuffer

DISK_WINDOW = 2**28
"""Bytes of each of the four windows of a folder: read ahead, waiting to be written, and the blocks
and the arrays that are kept to be used again."""

AHEAD = DISK_WINDOW
"""Bytes that are read before they are asked for."""

BEHIND = DISK_WINDOW
"""Bytes of stored entries that may wait for the disk, or one; a store waits until it is among
them."""

_LOOKED_AT = 256  # events
_ENOUGH = 64  # reads: with so many on their way, or there, nobody looks for more


def has_room(taken: int, nbytes: int, window: int) -> bool:
    """Whether a window of bytes takes more; one thing it always takes."""
    return not taken or taken + nbytes <= window


class InFiles(Protocol):
    """What is asked of the entries of a buffer: see `popxl._storage.buffer_storage.Entries`."""

    @property
    def may_be_filed(self) -> bool: ...

    def in_file(self, index: int) -> tuple[EntryFile, int] | None: ...


class Traffic:
    """What the programs of a process do with entries in a folder. One of them runs at a time.

    Attributes:
        scratch: the folder.
        recycled: arrays that were written, for what is read.
        waiting: bytes that are to be written.
        changed: notified when `waiting` is less.
    """

    _of: ClassVar[weakref.WeakValueDictionary[Scratch, Traffic]] = weakref.WeakValueDictionary()
    _finding = threading.RLock()

    def __init__(self, scratch: Scratch) -> None:
        self.scratch, self.recycled = scratch, Recycled(DISK_WINDOW)
        self._coming: Iterator[Event | None] = iter(())  # of the run
        self._undone: list[tuple[Load | Store, Index]] = []  # loads and stores that were looked at
        self._filed: dict[RemoteBuffer, InFiles] = {}
        self._reading: dict[tuple[EntryFile, int], Future[jax.Array]] = {}
        self._reading_bytes = 0
        self.waiting = 0
        self.changed = threading.Condition()
        self._walking = threading.Lock()

    @classmethod
    def opened(cls, folder: str | os.PathLike[str], process: int) -> Traffic:
        """That of a folder, which is in use from now on until it is closed as often.

        Raises:
            DiskError: see `Scratch`.
        """
        scratch = Scratch.opened(folder, process)
        with cls._finding:
            return cls._of.get(scratch) or cls._of.setdefault(scratch, cls(scratch))

    def close(self) -> None:
        """The folder is used no more.

        The garbage collector may find that out in a thread of the disk, which cannot wait for
        itself: then another does.
        """
        if forks.is_forked():  # it is that of the process that goes on
            return
        if self.scratch.is_own_thread:
            threading.Thread(target=self.close, name="popxl-close").start()
            return
        self.settle()
        self.scratch.close()

    @contextmanager
    def run(
        self, coming: Iterator[Event | None], entries: Mapping[RemoteBuffer, InFiles]
    ) -> Iterator[None]:
        """Inside, a program runs.

        Args:
            coming: what it does, from `popxl._schedule.lookahead.upcoming`.
        """
        with self._walking:
            self._coming = coming
            self._filed = {buffer: e for buffer, e in entries.items() if e.may_be_filed}
            self._ahead()
            try:
                yield
            finally:
                self._coming, self._undone, self._filed = iter(()), [], {}
                self._forget()

    def done(self, kind: type[Load | Store], buffer: RemoteBuffer, index: Index) -> None:
        """An entry is about to be loaded, or was stored."""
        if buffer not in self._filed:
            return
        at = 0  # loads are done in their order, stores in theirs; loads may be done earlier
        while at < len(self._undone) or self._look():
            step, entry = self._undone[at]
            if isinstance(step, kind) and step.buffer is buffer and entry == index:
                del self._undone[at]
                break
            at += 1
        if len(self._reading) < _ENOUGH:
            self._ahead()

    def _look(self) -> bool:
        """Look at one more event; whether one is known."""
        for event in self._coming:
            if event is None:
                break
            if not isinstance(event.step, Run) and event.step.buffer in self._filed:
                self._undone.append((event.step, event.entry))
                return True
        return False

    def taken(self, file: EntryFile, index: int) -> Future[jax.Array] | None:
        """What was read ahead of an entry, if it was; nobody has it any more."""
        with self.changed:
            future = self._reading.pop((file, index), None)
            if future is not None:
                self._reading_bytes -= file.nbytes
            return future

    def _ahead(self) -> None:
        """Read what is loaded next, but not past a store to the same entry."""
        stored: set[tuple[RemoteBuffer, int]] = set()
        at = 0
        while at < _LOOKED_AT and (at < len(self._undone) or self._look()):
            step, entry = self._undone[at]
            at += 1
            indices = set(entry) if isinstance(entry, tuple) else {entry}
            keys = {(step.buffer, index) for index in indices}
            if isinstance(step, Store):
                stored |= keys
            elif stored.isdisjoint(keys) and not self._begin(step, indices):
                return

    def _begin(self, step: Load, indices: Iterable[int]) -> bool:
        """Begin to read entries for a load; whether there was room."""
        for index in indices:
            place = self._filed[step.buffer].in_file(index)
            if place is None or place in self._reading:
                continue
            file, at = place
            if file.traffic is self and file.is_written(at):
                if not has_room(self._reading_bytes, file.nbytes, AHEAD):
                    return False
                with self.changed:
                    self._reading[place] = file.begin(at, step.donates)
                    self._reading_bytes += file.nbytes
        return True

    def settle(self) -> None:
        """Wait until everything is written; forget what was read."""
        self._forget()
        with self.changed:
            self.changed.wait_for(lambda: not self.waiting)

    def _forget(self) -> None:
        with self.changed:
            for future in self._reading.values():
                future.cancel()
            self._reading.clear()
            self._reading_bytes = 0


@dataclass(eq=False)
class _Waiting:
    """An entry that was stored and is not written; afterwards without its array."""

    array: jax.Array | None


class _Reading:
    """An entry on its way from a file.

    Args:
        future: is told the array, or what went wrong.
        array: makes the array when all `requests` are done.
    """

    def __init__(
        self,
        future: Future[jax.Array],
        array: Callable[[], jax.Array],
        requests: list[Callable[[], None]],
    ) -> None:
        self.requests = requests
        self._future, self._array = future, array
        self._left = len(requests)
        self._failed: BaseException | None = None
        self._lock = threading.Lock()

    def do(self, request: Callable[[], None]) -> None:
        """Do one of the requests; the last one to end makes the array."""
        failed: BaseException | None = None
        try:
            request()
        except BaseException as error:
            failed = error
        with self._lock:
            self._left, self._failed = self._left - 1, self._failed or failed
            if self._left:
                return
        try:
            if self._failed is not None:
                raise self._failed
            self._future.set_result(self._array())
        except BaseException as error:  # whoever waits must hear of it
            self._future.set_exception(error)


class EntryFile:
    """A file with the entries of a buffer: what this process holds of each.

    Args:
        entries: how many.
        memory: of an entry.
    """

    def __init__(self, traffic: Traffic, entries: int, memory: EntryMemory) -> None:
        self.traffic, self._memory = traffic, memory
        self.nbytes = sum(map(slot_of, memory.sizes))
        self._file = traffic.scratch.file(entries * self.nbytes)
        self._waiting: dict[int, _Waiting] = {}
        self._locks = [threading.Lock() for _ in range(entries)]
        self._written: set[int] = set()
        self._failed: BaseException | None = None

    def close(self) -> None:
        """Remove the file."""
        if not forks.is_forked():
            self._file.close()

    def is_written(self, index: int) -> bool:
        """Whether the file has the entry's newest value."""
        return index in self._written and index not in self._waiting

    def store(self, index: int, array: jax.Array) -> None:
        """Replace an entry, later on.

        Raises:
            DiskError: this or another entry could not be written.
        """
        self._check()
        self._written.add(index)
        traffic, waiting = self.traffic, _Waiting(array)
        with traffic.changed:
            traffic.changed.wait_for(lambda: has_room(traffic.waiting, self.nbytes, BEHIND))
            traffic.waiting += self.nbytes
            self._waiting[index] = waiting
        traffic.taken(self, index)  # and nobody reads ahead what the file still has
        traffic.scratch.pool.submit(self._write, index, waiting)
        if is_on(STEPWISE):
            traffic.settle()
            self._check()

    def forget(self, index: int) -> None:
        """Let an entry be one that was never stored."""
        with self.traffic.changed:
            self._waiting.pop(index, None)
            self._written.discard(index)
        self.traffic.taken(self, index)

    def load(self, index: int, donates: bool = False) -> tuple[jax.Array, bool] | None:
        """An entry, and whether nobody else has its array; None if it was never stored.

        Args:
            donates: the array may be donated.

        Raises:
            DiskError: it cannot be read, or another one could not be written.
        """
        self._check()
        if index not in self._written:
            return None
        with self.traffic.changed:
            waiting = self._waiting.get(index)
            if waiting is not None and waiting.array is not None:
                return waiting.array, False
        ahead = self.traffic.taken(self, index)
        return (self.read(index, donates) if ahead is None else ahead.result()), True

    def begin(self, index: int, donates: bool) -> Future[jax.Array]:
        """Let the folder's threads read an entry that is in the file, all of them together: it is
        wanted before those after it."""
        future, pool = Future[jax.Array](), self.traffic.scratch.pool

        def requests() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    views, array = self._memory.room(donates)
                except BaseException as error:
                    future.set_exception(error)
                    return
                reading = _Reading(future, array, self._requests(index, views))
                for request in reading.requests:
                    pool.submit(reading.do, request)

        pool.submit(requests)
        return future

    def read(self, index: int, donates: bool) -> jax.Array:
        """An entry that is in the file."""
        views, array = self._memory.room(donates)
        for request in self._requests(index, views):
            request()
        return array()

    def _requests(self, index: int, views: Iterable[np.ndarray]) -> list[Callable[[], None]]:
        at, requests = index * self.nbytes, list[Callable[[], None]]()
        for view in views:
            requests += [partial(self._file.read_one, at, view, i) for i in requests_of(view.size)]
            at += slot_of(view.size)
        return requests

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _write(self, index: int, waiting: _Waiting) -> None:
        traffic = self.traffic
        try:
            with self._locks[index]:
                if self._waiting.get(index) is waiting:  # nothing newer
                    at = index * self.nbytes
                    for view in self._memory.views(waiting.array):
                        self._file.write(at, view)
                        at += slot_of(view.size)
        except BaseException as error:
            self._failed = error
        finally:
            with traffic.changed:
                if self._waiting.get(index) is waiting and self._failed is None:
                    del self._waiting[index]
                array, waiting.array = waiting.array, None
                traffic.waiting -= self.nbytes
                traffic.changed.notify_all()
        if sys.getrefcount(array) <= 2:  # this function's and the call's: nobody else's
            self._memory.recycle(array)
