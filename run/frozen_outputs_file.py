"""Cache files of a frozen model's outputs: rows of each sample, in records of one batch each.

A record has a number of samples, a digest and their rows. The digest covers the record and the
digest before it, so that a changed, missing, foreign or truncated record ends the part that is
used: SIGKILL loses one batch. An unfinished file (draft) is renamed when it has all samples.

Rows stay in the file and are read when they are asked for: those of all tokens may exceed memory.
"""

from __future__ import annotations

import hashlib
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from files.atomic_writing import wrap_write_errors
from files.errors import FileError, WriteError
from files.file_lock import open_lock, try_lock
from files.formatting import format_path
from files.temp_folders import fsync
from files.text_files import check_regular_file
from terminal.screen import say

DRAFT, COMPLETE = ".draft", ".rows"
"""Suffixes of an unfinished and of a complete file."""

_COUNT = struct.Struct("<Q")
_DIGEST_BYTES = hashlib.sha256().digest_size
_HEAD_BYTES = _COUNT.size + _DIGEST_BYTES


class _Record(NamedTuple):
    """A batch of samples: their end, the record's end in the file, its digest and its rows.

    `content` is None if the rows are in the file.
    """

    samples: int
    byte: int
    sha256: bytes
    content: np.ndarray | None = None


class OutputsFile:
    """Rows of samples in a cache file, which grows batch by batch until it is complete.

    It is a cache: rows that cannot be read are computed again, and a failed write is a warning;
    what is not in the file is held in memory.
    """

    def __init__(
        self, path: Path, offsets: np.ndarray, dtype: np.dtype, purpose: str, writes: bool
    ) -> None:
        """Read the file, if there is one.

        Args:
            path: of the complete file or of the draft.
            offsets: int64 [samples + 1], the first row of each sample, and the end of the last.
            dtype: of a row.
            purpose: whose outputs these are, such as "the reference".
            writes: True if this process appends to the draft; only one process at a time can.
        """
        self._path, self._offsets, self._dtype, self._purpose = path, offsets, dtype, purpose
        self._file: int | None = None
        self._appends = False
        # The chain of digests starts with the name, so that a renamed file is invalid.
        self._records = [_Record(0, 0, hashlib.sha256(path.stem.encode()).digest())]
        try:
            self._open(writes)
            while self._file is not None and self._read_record():
                pass
        except FileError as error:
            self._stop_writing(error)

    @property
    def num_samples(self) -> int:
        """Number of samples whose rows are known."""
        return self._records[-1].samples

    @property
    def is_complete(self) -> bool:
        """True if the rows of all samples are known."""
        return self.num_samples == len(self._offsets) - 1

    @property
    def all_rows_on_disk(self) -> bool:
        """True if no row is held in memory."""
        return all(record.content is None for record in self._records)

    def truncate(self, samples: int) -> None:
        """Truncate the rows to those of at most `samples` samples, at the end of a record."""
        while self.num_samples > samples:
            self._records.pop()
        self._try_write(lambda file: os.ftruncate(file, self._records[-1].byte))

    def append(self, rows: np.ndarray, num_samples: int) -> None:
        """Append the rows of the next samples."""
        held = np.array(rows, self._dtype)
        head, content, last = _COUNT.pack(num_samples), held.tobytes(), self._records[-1]
        sha256 = _chain_digest(last.sha256, head, content)
        self._try_write(lambda file: _write_at(file, last.byte, head + sha256 + content))
        end, memory = last.byte + _HEAD_BYTES + len(content), None if self._appends else held
        self._records.append(_Record(last.samples + num_samples, end, sha256, memory))

    def publish(self) -> None:
        """Rename the draft, which has all samples, to the complete file's name."""

        def rename(_: int) -> None:
            fsync(self._path)
            self._path = self._path.rename(self._path.with_suffix(COMPLETE))

        self._try_write(rename)

    def remove(self) -> None:
        """Delete the draft, if this process appends to it."""
        if self._appends:
            self._path.unlink(missing_ok=True)

    def rows(self, samples: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the rows of the samples at these indices, one after the other."""
        parts = [self._rows_of_sample(int(sample)) for sample in samples]
        return np.concatenate([np.empty(0, self._dtype), *parts])

    def close(self) -> None:
        """Close the file; its lock is released."""
        if self._file is not None:
            os.close(self._file)
        self._file, self._appends = None, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _rows_of_sample(self, sample: int) -> np.ndarray:
        number = bisect_right(self._records, sample, key=lambda record: record.samples)
        before, record = self._records[number - 1], self._records[number]
        start, stop = self._offsets[[sample, sample + 1]] - self._offsets[before.samples]
        if record.content is not None:
            return record.content[start:stop]
        assert self._file is not None, "the file is open"
        itemsize = self._dtype.itemsize
        first = before.byte + _HEAD_BYTES + int(start) * itemsize
        content = os.pread(self._file, int(stop - start) * itemsize, first)
        return np.frombuffer(content, self._dtype)

    def _open(self, writes: bool) -> None:
        if writes:
            self._file = _open_locked(self._path, self._purpose)
            self._appends = self._file is not None
        if self._file is not None or not self._path.exists():
            return
        check_regular_file(self._path)
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            reason = error.strerror or error
            raise FileError(f"cannot read {format_path(self._path)}: {reason}") from error

    def _read_record(self) -> bool:
        """Read the next record; returns False if it is missing or invalid."""
        assert self._file is not None
        last = self._records[-1]
        head = os.pread(self._file, _HEAD_BYTES, last.byte)
        if len(head) < _HEAD_BYTES:
            return False
        (count,), sha256 = _COUNT.unpack(head[: _COUNT.size]), head[_COUNT.size :]
        end = last.samples + count
        if last.samples < end < len(self._offsets):
            size = int(self._offsets[end] - self._offsets[last.samples]) * self._dtype.itemsize
            content = os.pread(self._file, size, last.byte + _HEAD_BYTES)
            if len(content) < size:
                return False
            if sha256 == _chain_digest(last.sha256, head[: _COUNT.size], content):
                self._records.append(_Record(end, last.byte + _HEAD_BYTES + size, sha256))
                return True
        if self._path.suffix == DRAFT:
            say(
                f"warning: {format_path(self._path)} is damaged: the samples after the first "
                f"{self.num_samples} are computed again"
            )
        return False

    def _try_write(self, action: Callable[[int], object]) -> None:
        """Change the file, if this process appends to it and no write has failed."""
        if not self._appends or self._file is None:
            return
        try:
            with wrap_write_errors(self._purpose, self._path):
                action(self._file)
        except WriteError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: FileError) -> None:
        """Hold what follows in memory; the records that were written stay readable."""
        say(f"warning: {error}: a run that is broken off computes {self._purpose} again")
        self._appends = False


def read_complete_file(
    path: Path, offsets: np.ndarray, dtype: np.dtype, purpose: str
) -> OutputsFile | None:
    """Read a complete cache file; None if it is missing, or damaged (with a warning)."""
    if not path.exists():
        return None
    file = OutputsFile(path, offsets, dtype, purpose, writes=False)
    if file.is_complete:
        return file
    file.close()
    say(f"warning: {format_path(path)} cannot be used: it is damaged")
    return None


def remove_stale_drafts(folder: Path) -> None:
    """Delete unfinished cache files in a folder that no process appends to."""
    with suppress(OSError):
        for path in folder.glob(f"*{DRAFT}"):
            with suppress(FileError, OSError):
                file = _open_locked(path, "the draft")
                if file is not None:
                    os.close(file)
                    path.unlink()


def _open_locked(path: Path, purpose: str) -> int | None:
    """Open or create an unfinished cache file and lock it; None if another process has the lock.

    Raises:
        FileError: it cannot be created.
    """
    if path.exists():
        check_regular_file(path)  # opening a pipe would block
    with wrap_write_errors(purpose, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_lock(path)
        try:
            is_free = try_lock(file) is not False
        except OSError:
            os.close(file)
            raise
    if is_free:
        return file
    os.close(file)
    return None


def _write_at(file: int, start: int, content: bytes) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done:], start + done)


def _chain_digest(previous_sha256: bytes, head: bytes, content: bytes) -> bytes:
    sha256 = hashlib.sha256(previous_sha256 + head)
    sha256.update(content)
    return sha256.digest()
