"""Scratch files for remote-buffer entries on disk: direct I/O with checksums.

Requests are large and aligned, and bypass the page cache where the file system allows it
(O_DIRECT): data is read once, and the cache would take the memory that the files are to save.
Threads make them in calls that release Python's lock.

A checksum of each written request stays in memory and is compared when it is read. Files are
unlinked when they are created, so that the kernel frees them when the process ends in any way.

Each thread has its own staging memory. A slot is written by one thread at a time, and not read at
the same time; `popxl._storage.disk_queue` makes sure of that.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import shutil
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import google_crc32c
import numpy as np

from popdist._coordination_service import raise_open_file_limit
from popxl.errors import DiskError

ALIGNED = 4096
"""Bytes that offsets, lengths and memory of direct requests are multiples of."""

LEAD = 64
"""Bytes from a page boundary to the memory of a large array: malloc's header, then XLA's alignment.
In a file it is the same, so that the pages of both coincide and nothing has to be copied."""

REQUEST = 8 * 2**20
"""Bytes of a request."""

THREADS = 4
PATIENCE = 60.0
"""Seconds for which a request is tried again that the kernel cannot begin yet (EAGAIN)."""

_NAME = "popxl-scratch"
_LOCK = "lock"
_POOL = "popxl-disk"  # what the names of its threads begin with


def _align_up(nbytes: int) -> int:
    """Returns a size rounded up to the alignment of direct I/O (bytes)."""
    return -(-nbytes // ALIGNED) * ALIGNED


def padded_bytes(nbytes: int) -> int:
    """Returns the padded size of data of `nbytes` in a file or memory block."""
    return _align_up(LEAD + nbytes)


def _map_memory(nbytes: int) -> mmap.mmap:
    """Returns page-aligned private memory, in huge pages where possible.

    These cut the kernel's time for direct I/O. Shared memory, Python's default, would get small
    pages.
    """
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


def request_offsets(nbytes: int) -> range:
    """Returns the byte offsets of the I/O requests that transfer data of `nbytes` in its slot."""
    return range(0, padded_bytes(nbytes), REQUEST)


class BlockPool:
    """Pool of page-aligned host memory blocks for disk I/O.

    A block comes back when nobody holds the array that was made of it; XLA may.
    """

    def __init__(self, max_free_bytes: int) -> None:
        """Create a pool that keeps at most `max_free_bytes` of free blocks."""
        self._max_free_bytes, self._free_bytes = max_free_bytes, 0
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> np.ndarray:
        """Returns a block of at least `nbytes` of page-aligned memory (uint8)."""
        size = padded_bytes(nbytes)
        with self._lock:
            free = self._free[size]
            block = free.pop() if free else None
            if block is not None:
                self._free_bytes -= size
        if block is None:
            block = _map_memory(size)
        array = np.frombuffer(block, np.uint8)
        weakref.finalize(array, self._put_back, block).atexit = False
        return array[LEAD:]

    def _put_back(self, block: mmap.mmap) -> None:
        with self._lock:
            if self._free_bytes + len(block) <= self._max_free_bytes:
                self._free[len(block)].append(block)
                self._free_bytes += len(block)


class ScratchFolder:
    """A folder of temporary files, which are deleted when the process ends.

    Attributes:
        direct: whether requests bypass the page cache (O_DIRECT).
        read, written: bytes so far.
        blocks: for what is read.
    """

    _instances: ClassVar[dict[tuple[Path, int], ScratchFolder]] = {}
    _instances_lock: ClassVar[threading.RLock] = threading.RLock()
    """Of these, and of how many use each; the garbage collector may close one meanwhile."""

    def __init__(self, folder: Path, process: int = 0, max_free_bytes: int = 2**28) -> None:
        """Creates the folder, and deletes files that a crashed host or NFS (`.nfs*`) left in it.

        Args:
            process: index of the process, which gets a subfolder of its own.
            max_free_bytes: see `BlockPool`.

        Raises:
            DiskError: another process uses the folder, or it cannot be written.
        """
        self.parent, self._process = folder, process
        self.folder = folder / f"{_NAME}-{process}"
        self.read = self.written = 0
        self.blocks = BlockPool(max_free_bytes)
        self.pool = ThreadPoolExecutor(THREADS, _POOL)
        self._file_count, self._users, self._local = 0, 0, threading.local()
        self._request_starts: dict[int, float] = {}  # requests under way: thread to monotonic time
        self._count_lock = threading.Lock()
        self._is_closing = False
        self._closed = threading.Event()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError as error:
            raise _disk_error(f"the disk folder {folder} cannot be used", error) from error
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock_file)
            raise DiskError(
                f"the disk folder {folder} is in use by another run: give each run its own"
            ) from error
        try:
            for remaining in self.folder.iterdir():
                if remaining.name != _LOCK:
                    with suppress(OSError):
                        remaining.unlink()
            raise_open_file_limit()  # each buffer on disk takes one
            self.direct = self._supports_direct_io()
        except OSError as error:
            os.close(self._lock_file)
            raise _disk_error(f"the disk folder {folder} cannot be cleared", error) from error

    def _supports_direct_io(self) -> bool:
        flag = getattr(os, "O_DIRECT", 0)
        try:
            descriptor = self.create_unlinked_file(flag)
            try:
                os.pwrite(descriptor, mmap.mmap(-1, ALIGNED), 0)
            finally:
                os.close(descriptor)
        except OSError:
            return False
        return bool(flag)

    def create_unlinked_file(self, flags: int) -> int:
        """Creates a file, unlinks it and returns its file descriptor."""
        self._file_count += 1
        path = self.folder / str(self._file_count)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)
        path.unlink()
        return descriptor

    @classmethod
    def open_shared(cls, folder: str | os.PathLike[str], process: int = 0) -> ScratchFolder:
        """Returns the process's scratch folder at a path; each user closes it once."""
        key = Path(folder).absolute(), process
        while True:
            with cls._instances_lock:
                scratch = cls._instances.get(key)
                if scratch is None:
                    scratch = cls._instances[key] = cls(*key)
                if not scratch._is_closing:
                    scratch._users += 1
                    return scratch
            scratch._closed.wait()

    def close(self) -> None:
        """Removes the scratch files after the last user has closed the folder."""
        with self._instances_lock:
            self._users -= 1
            if self._users > 0 or self._is_closing:
                return
            self._is_closing = True
        try:
            self.pool.shutdown(wait=True, cancel_futures=True)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock_file)
            with self._instances_lock:
                self._instances.pop((self.parent, self._process), None)
            self._closed.set()

    @property
    def is_pool_thread(self) -> bool:
        """True if the calling thread belongs to the I/O thread pool `pool`."""
        return threading.current_thread().name.startswith(_POOL)

    def create_file(self, nbytes: int) -> ScratchFile:
        """Creates a scratch file of `nbytes`.

        Raises:
            DiskError: the disk is full.
        """
        return ScratchFile(self, nbytes)

    def count_bytes(self, read: int = 0, written: int = 0) -> None:
        """Adds to the folder's counters of bytes read and written."""
        with self._count_lock:
            self.read += read
            self.written += written

    @contextmanager
    def time_request(self) -> Iterator[float]:
        """Context that times an I/O request of this thread; yields its start time (seconds)."""
        now = self._request_starts[threading.get_ident()] = time.monotonic()
        try:
            yield now
        finally:
            del self._request_starts[threading.get_ident()]

    @property
    def oldest_request_seconds(self) -> float:
        """Seconds since the oldest unfinished I/O request started."""
        now = time.monotonic()
        return max((now - started for started in list(self._request_starts.values())), default=0.0)

    def staging_buffer(self) -> np.ndarray:
        """Returns this thread's page-aligned memory through which an I/O request is copied."""
        if not hasattr(self._local, "bytes"):
            self._local.bytes = np.frombuffer(_map_memory(REQUEST), np.uint8)
        return self._local.bytes


_Request = tuple[list[np.ndarray], list[tuple[np.ndarray, np.ndarray]]]
"""Its memory; pairs of staged bytes and those of data that are copied."""


class ScratchFile:
    """A file of a `ScratchFolder` folder."""

    def __init__(self, scratch: ScratchFolder, nbytes: int) -> None:
        self._scratch, self.nbytes = scratch, nbytes
        self._checksums: dict[int, int] = {}  # of what requests wrote, by their place
        try:
            self._file = scratch.create_unlinked_file(os.O_DIRECT if scratch.direct else 0)
        except OSError as error:
            raise self._disk_error("open a file of", nbytes, error) from error
        try:
            _allocate_file(self._file, _align_up(max(nbytes, 1)))
        except OSError as error:
            self.close()
            raise self._disk_error("have room for", nbytes, error) from error

    def close(self) -> None:
        """Closes the scratch file, which frees its disk space."""
        os.close(self._file)

    def write(self, offset: int, data: np.ndarray) -> None:
        """Writes data to a slot (padded block) of the file, at an aligned offset.

        Raises:
            DiskError: the disk is full or broken.
        """
        try:
            for start in request_offsets(data.size):
                parts, copies = self._request_memory(start, data)
                for staged, part in copies:
                    staged[...] = part
                self._checksums[offset + start] = _checksum(data, start)
                self._run_request(os.pwritev, parts, offset + start)
        except OSError as error:
            raise self._disk_error("be written with", data.size, error) from error
        self._scratch.count_bytes(written=data.size)

    def read(self, offset: int, data: np.ndarray) -> None:
        """Reads a slot (padded block) of the file, at an aligned offset, into `data`.

        Raises:
            DiskError: the disk is broken, or returns other data than was written.
        """
        for start in request_offsets(data.size):
            self.run_read_request(offset, data, start)

    def run_read_request(self, offset: int, data: np.ndarray, start: int) -> None:
        """Runs one of the read requests for a slot (padded block); several threads can share it.

        Args:
            start: of `request_offsets(data.size)`.
        """
        parts, copies = self._request_memory(start, data)
        try:
            self._run_request(os.preadv, parts, offset + start)
        except OSError as error:
            raise self._disk_error("be read for", data.size, error) from error
        for staged, part in copies:
            part[...] = staged
        self._verify_checksum(offset + start, _checksum(data, start), min(REQUEST, data.size))
        end = min(start + REQUEST, LEAD + data.size)
        self._scratch.count_bytes(read=max(end - max(start, LEAD), 0))

    def _verify_checksum(self, file_offset: int, checksum: int, nbytes: int) -> None:
        """Raises if the checksum of read data differs from that of the written data."""
        if self._checksums.get(file_offset, checksum) != checksum:
            raise DiskError(
                f"the disk folder {self._scratch.parent} returns other bytes than were written "
                f"there (somewhere in {_format_bytes(nbytes)}): use a folder of another disk, and "
                "start from the last checkpoint"
            )

    def _request_memory(self, request_start: int, data: np.ndarray) -> _Request:
        """Returns the memory that an I/O request reads into or writes from.

        Whole pages of `data` where page boundaries in memory and file coincide, staging memory
        elsewhere.
        """
        staging = self._scratch.staging_buffer()
        end = min(request_start + REQUEST, padded_bytes(data.size))
        first, last = max(request_start, LEAD), min(end, LEAD + data.size)
        page_start, page_end = _align_up(first), last // ALIGNED * ALIGNED
        if (data.ctypes.data - LEAD) % ALIGNED or page_start >= page_end:
            page_start = page_end = end  # all is staged

        def slice_data(request_start: int, end: int) -> np.ndarray:
            return data[request_start - LEAD : end - LEAD]

        head = staging[: page_start - request_start]
        tail = staging[page_start - request_start :][: end - page_end]
        copies = [
            (
                head[first - request_start : last - request_start],
                slice_data(first, min(page_start, last)),
            ),
            (tail[: max(last - page_end, 0)], slice_data(page_end, last)),
        ]
        return [
            part for part in (head, slice_data(page_start, page_end), tail) if part.size
        ], copies

    def _run_request(
        self, transfer: Callable[[int, Any, int], int], parts: list[np.ndarray], file_offset: int
    ) -> None:
        """Runs an I/O request to its end, although the kernel can do it in pieces or delay it."""
        with self._scratch.time_request() as started:
            self._transfer_parts(transfer, parts, file_offset, started + PATIENCE)
        if not self._scratch.direct:
            os.posix_fadvise(
                self._file, file_offset, sum(part.size for part in parts), os.POSIX_FADV_DONTNEED
            )

    def _transfer_parts(
        self,
        transfer: Callable[[int, Any, int], int],
        parts: list[np.ndarray],
        file_offset: int,
        end: float,
    ) -> None:
        remaining = list(parts)
        while remaining:
            try:
                count = transfer(self._file, remaining, file_offset)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
                continue
            if count <= 0:
                raise OSError(0, "the file ends too early")
            file_offset += count
            while remaining and count >= remaining[0].size:
                count -= remaining.pop(0).size
            if count:
                remaining[0] = remaining[0][count:]

    def _disk_error(self, problem: str, nbytes: int, error: OSError) -> DiskError:
        folder = self._scratch.parent
        return _disk_error(
            f"the disk folder {folder} cannot {problem} {_format_bytes(nbytes)}", error, folder
        )


def _checksum(data: np.ndarray, request_start: int) -> int:
    """Returns the CRC-32C of the data of one I/O request."""
    part = data[max(request_start - LEAD, 0) : request_start + REQUEST - LEAD]
    return google_crc32c.value(part)


def _disk_error(problem: str, error: OSError, folder: Path | None = None) -> DiskError:
    free = ""
    if folder is not None and folder.exists():
        free = f" ({_format_bytes(shutil.disk_usage(folder).free)} are free)"
    reason = error.strerror or str(error)
    advice = "use a folder of another disk, or less state on disk"
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        advice = f"raise the hard limit of {limit} open files (ulimit -Hn)"
    return DiskError(f"{problem}: {reason}{free}: {advice}")


def _format_bytes(nbytes: int) -> str:
    """Formats a number of bytes: `1.23 GB`."""
    power = min(next(i for i in range(9) if nbytes < 999.5 * 1000**i), 4)
    return f"{nbytes / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _allocate_file(descriptor: int, nbytes: int) -> None:
    """Sets the size of a file, and allocates its blocks if the file system can (NFS: from 4.2).

    `os.posix_fallocate` would write into each block where it cannot: O_DIRECT refuses that, and
    over a network it takes hours.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "fallocate"):
        if libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) == 0:
            return
        if (number := ctypes.get_errno()) not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number))
    os.ftruncate(descriptor, nbytes)
