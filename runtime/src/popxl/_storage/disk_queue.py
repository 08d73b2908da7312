"""Disk queue of remote-buffer entries: asynchronous writes, and reads ahead of loads.

A store hands its array to a thread, and a load of an entry that is still being written returns that
array. Threads read the next entries (`popxl._schedule.lookahead`) within a window of bytes. The
memory of written arrays is reused for reads (`popxl._storage.entry_memory`).

The executing thread owns the order of events; of the programs that share a folder, one runs at a
time. It shares the pending writes and reads with the folder's threads, under
`DiskQueue.write_done`. At the end of a run, read-ahead is dropped, and pending writes continue.
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
from popxl._devices.cpu import BufferPool
from popxl._ir.debug_flags import STEPWISE, is_debug_flag_set
from popxl._schedule.schedule import Load, Run, Store
from popxl._storage.disk_window import (
    DISK_WINDOW,
    READ_AHEAD_BYTES,
    WRITE_BEHIND_BYTES,
    fits_byte_window,
)
from popxl._storage.scratch_files import ScratchFolder, padded_bytes, request_offsets

if TYPE_CHECKING:
    from popxl._schedule.lookahead import LookaheadEvent
    from popxl._schedule.schedule import Index
    from popxl._storage.entry_memory import EntryMemory
    from popxl.remote_buffer import RemoteBuffer

_MAX_LOOKAHEAD = 256  # events
_MAX_PENDING_READS = 64  # pending and finished reads; with more, the look-ahead pauses


class DiskEntries(Protocol):
    """Methods of `popxl._storage.buffer_storage.BufferStorage` that the disk queue calls."""

    @property
    def may_be_on_disk(self) -> bool: ...

    def disk_slot(self, index: int) -> tuple[EntryFile, int] | None: ...


class DiskQueue:
    """Queue of disk reads and writes of remote-buffer entries; a process's programs share it.

    One program runs at a time.

    Attributes:
        scratch: the folder.
        buffer_pool: arrays that were written, for what is read.
        pending_write: bytes that are to be written.
        changed: notified when `pending_write` is less.
    """

    _by_folder: ClassVar[weakref.WeakValueDictionary[ScratchFolder, DiskQueue]] = (
        weakref.WeakValueDictionary()
    )
    _registry_lock = threading.RLock()

    def __init__(self, scratch: ScratchFolder) -> None:
        self.scratch, self.buffer_pool = scratch, BufferPool(DISK_WINDOW)
        self._events: Iterator[LookaheadEvent | None] = iter(())  # of the run
        self._upcoming_transfers: list[
            tuple[Load | Store, Index]
        ] = []  # loads and stores that were looked at
        self._disk_entries: dict[RemoteBuffer, DiskEntries] = {}
        self._pending_reads: dict[tuple[EntryFile, int], Future[jax.Array]] = {}
        self._pending_read_bytes = 0
        self.pending_write_bytes = 0
        self.write_done = threading.Condition()
        self._run_lock = threading.Lock()

    @classmethod
    def open_shared(cls, folder: str | os.PathLike[str], process: int) -> DiskQueue:
        """Returns the process's disk queue of a folder, counting users; each one closes it once.

        Raises:
            DiskError: see `ScratchFolder`.
        """
        scratch = ScratchFolder.open_shared(folder, process)
        with cls._registry_lock:
            return cls._by_folder.get(scratch) or cls._by_folder.setdefault(scratch, cls(scratch))

    def close(self) -> None:
        """Releases the folder of remote-buffer entries on disk; the last user removes its files.

        The garbage collector may find that out in a thread of the disk, which cannot wait for
        itself: then another does.
        """
        if forks.is_forked():  # the files belong to the parent process
            return
        if self.scratch.is_pool_thread:
            threading.Thread(target=self.close, name="popxl-close").start()
            return
        self.wait_all()
        self.scratch.close()

    @contextmanager
    def run_context(
        self, events: Iterator[LookaheadEvent | None], entries: Mapping[RemoteBuffer, DiskEntries]
    ) -> Iterator[None]:
        """Context for a run of a program, whose upcoming loads and stores drive the disk reads.

        Args:
            events: look-ahead of the run, from `popxl._schedule.lookahead.lookahead_events`.
        """
        with self._run_lock:
            self._events = events
            self._disk_entries = {buffer: e for buffer, e in entries.items() if e.may_be_on_disk}
            self._read_ahead()
            try:
                yield
            finally:
                self._events, self._upcoming_transfers, self._disk_entries = iter(()), [], {}
                self._drop_read_ahead()

    def advance(self, kind: type[Load | Store], buffer: RemoteBuffer, index: Index) -> None:
        """Records that the run loads or stored an entry, and starts further disk reads ahead."""
        if buffer not in self._disk_entries:
            return
        at = 0  # loads are done in their order, stores in theirs; loads may be done earlier
        while at < len(self._upcoming_transfers) or self._read_event():
            step, entry = self._upcoming_transfers[at]
            if isinstance(step, kind) and step.buffer is buffer and entry == index:
                del self._upcoming_transfers[at]
                break
            at += 1
        if len(self._pending_reads) < _MAX_PENDING_READS:
            self._read_ahead()

    def _read_event(self) -> bool:
        """Takes the next upcoming load or store of an entry on disk; False if there is none yet."""
        for event in self._events:
            if event is None:
                break
            if not isinstance(event.step, Run) and event.step.buffer in self._disk_entries:
                self._upcoming_transfers.append((event.step, event.entry_index))
                return True
        return False

    def pop_read_ahead(self, file: EntryFile, index: int) -> Future[jax.Array] | None:
        """Removes and returns an entry's disk read that was started ahead of its load, if any."""
        with self.write_done:
            future = self._pending_reads.pop((file, index), None)
            if future is not None:
                self._pending_read_bytes -= file.nbytes
            return future

    def _read_ahead(self) -> None:
        """Starts disk reads for the next loads, but none past a store to the same entry."""
        stored: set[tuple[RemoteBuffer, int]] = set()
        at = 0
        while at < _MAX_LOOKAHEAD and (at < len(self._upcoming_transfers) or self._read_event()):
            step, entry = self._upcoming_transfers[at]
            at += 1
            indices = set(entry) if isinstance(entry, tuple) else {entry}
            keys = {(step.buffer, index) for index in indices}
            if isinstance(step, Store):
                stored |= keys
            elif stored.isdisjoint(keys) and not self._start_reads(step, indices):
                return

    def _start_reads(self, step: Load, indices: Iterable[int]) -> bool:
        """Starts the disk reads for a load; False if the byte window of reads is full."""
        for index in indices:
            slot = self._disk_entries[step.buffer].disk_slot(index)
            if slot is None or slot in self._pending_reads:
                continue
            file, at = slot
            if file.disk_queue is self and file.is_written(at):
                if not fits_byte_window(self._pending_read_bytes, file.nbytes, READ_AHEAD_BYTES):
                    return False
                with self.write_done:
                    self._pending_reads[slot] = file.start_read(at, step.donates)
                    self._pending_read_bytes += file.nbytes
        return True

    def wait_all(self) -> None:
        """Waits for all disk writes, and drops buffer entries that were read ahead of loads."""
        self._drop_read_ahead()
        with self.write_done:
            self.write_done.wait_for(lambda: not self.pending_write_bytes)

    def _drop_read_ahead(self) -> None:
        with self.write_done:
            for future in self._pending_reads.values():
                future.cancel()
            self._pending_reads.clear()
            self._pending_read_bytes = 0


@dataclass(eq=False)
class _PendingWrite:
    """A remote-buffer entry whose disk write is not finished; its array is dropped afterwards."""

    array: jax.Array | None


class _PendingRead:
    """A remote-buffer entry that is being read from a file.

    Args:
        future: receives the array or an exception.
        array: makes the array when all `submit_requests` are done.
    """

    def __init__(
        self,
        future: Future[jax.Array],
        array: Callable[[], jax.Array],
        requests: list[Callable[[], None]],
    ) -> None:
        self.requests = requests
        self._future, self._array = future, array
        self._remaining = len(requests)
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def run_request(self, request: Callable[[], None]) -> None:
        """Runs one of the entry's read requests; the last to finish creates the entry's array."""
        failed: BaseException | None = None
        try:
            request()
        except BaseException as error:
            failed = error
        with self._lock:
            self._remaining, self._error = self._remaining - 1, self._error or failed
            if self._remaining:
                return
        try:
            if self._error is not None:
                raise self._error
            self._future.set_result(self._array())
        except BaseException as error:  # the waiting thread must see it
            self._future.set_exception(error)


class EntryFile:
    """Scratch file with this process's shards of a remote buffer's entries.

    Args:
        entries: number of entries.
        memory: memory layout of an entry.
    """

    def __init__(self, disk_queue: DiskQueue, entries: int, memory: EntryMemory) -> None:
        self.disk_queue, self._memory = disk_queue, memory
        self.nbytes = sum(map(padded_bytes, memory.sizes))
        self._file = disk_queue.scratch.create_file(entries * self.nbytes)
        self._pending_writes: dict[int, _PendingWrite] = {}
        self._locks = [threading.Lock() for _ in range(entries)]
        self._stored_indices: set[int] = set()
        self._error: BaseException | None = None

    def close(self) -> None:
        """Removes the scratch file."""
        if not forks.is_forked():
            self._file.close()

    def is_written(self, index: int) -> bool:
        """True if the scratch file has the latest value of a remote-buffer entry."""
        return index in self._stored_indices and index not in self._pending_writes

    def store(self, index: int, array: jax.Array) -> None:
        """Queues the disk write of a new value of a remote-buffer entry.

        Raises:
            DiskError: this or another entry could not be written.
        """
        self._raise_write_error()
        self._stored_indices.add(index)
        disk_queue, pending_write = self.disk_queue, _PendingWrite(array)
        with disk_queue.write_done:
            disk_queue.write_done.wait_for(
                lambda: fits_byte_window(
                    disk_queue.pending_write_bytes, self.nbytes, WRITE_BEHIND_BYTES
                )
            )
            disk_queue.pending_write_bytes += self.nbytes
            self._pending_writes[index] = pending_write
        disk_queue.pop_read_ahead(self, index)  # and nobody reads ahead what the file still has
        disk_queue.scratch.pool.submit(self._write_entry, index, pending_write)
        if is_debug_flag_set(STEPWISE):
            disk_queue.wait_all()
            self._raise_write_error()

    def discard(self, index: int) -> None:
        """Resets a remote-buffer entry to zeros, as if it had never been stored."""
        with self.disk_queue.write_done:
            self._pending_writes.pop(index, None)
            self._stored_indices.discard(index)
        self.disk_queue.pop_read_ahead(self, index)

    def load(self, index: int, donates: bool = False) -> tuple[jax.Array, bool] | None:
        """Returns a remote-buffer entry and True if nothing else uses it; None if never stored.

        Args:
            donates: the array may be donated.

        Raises:
            DiskError: it cannot be read, or another one could not be written.
        """
        self._raise_write_error()
        if index not in self._stored_indices:
            return None
        with self.disk_queue.write_done:
            pending_write = self._pending_writes.get(index)
            if pending_write is not None and pending_write.array is not None:
                return pending_write.array, False
        read_ahead = self.disk_queue.pop_read_ahead(self, index)
        return (self.read(index, donates) if read_ahead is None else read_ahead.result()), True

    def start_read(self, index: int, donates: bool) -> Future[jax.Array]:
        """Starts reading a remote-buffer entry with all threads of the folder's I/O pool."""
        future, pool = Future[jax.Array](), self.disk_queue.scratch.pool

        def submit_requests() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    views, array = self._memory.allocate(donates)
                except BaseException as error:
                    future.set_exception(error)
                    return
                reading = _PendingRead(future, array, self._io_requests(index, views))
                for request in reading.requests:
                    pool.submit(reading.run_request, request)

        pool.submit(submit_requests)
        return future

    def read(self, index: int, donates: bool) -> jax.Array:
        """Reads a remote-buffer entry from the scratch file."""
        views, array = self._memory.allocate(donates)
        for request in self._io_requests(index, views):
            request()
        return array()

    def _io_requests(self, index: int, views: Iterable[np.ndarray]) -> list[Callable[[], None]]:
        at, requests = index * self.nbytes, list[Callable[[], None]]()
        for view in views:
            requests += [
                partial(self._file.run_read_request, at, view, i)
                for i in request_offsets(view.size)
            ]
            at += padded_bytes(view.size)
        return requests

    def _raise_write_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_entry(self, index: int, pending_write: _PendingWrite) -> None:
        disk_queue = self.disk_queue
        try:
            with self._locks[index]:
                if self._pending_writes.get(index) is pending_write:  # nothing newer
                    at = index * self.nbytes
                    for view in self._memory.byte_views(pending_write.array):
                        self._file.write(at, view)
                        at += padded_bytes(view.size)
        except BaseException as error:
            self._error = error
        finally:
            with disk_queue.write_done:
                if self._pending_writes.get(index) is pending_write and self._error is None:
                    del self._pending_writes[index]
                array, pending_write.array = pending_write.array, None
                disk_queue.pending_write_bytes -= self.nbytes
                disk_queue.write_done.notify_all()
        if sys.getrefcount(array) <= 2:  # this function's and the call's: nobody else's
            self._memory.release(array)
