"""Cache files of reference log-probabilities: complete, and unfinished ones (drafts).

A draft is a sequence of records, each with a number of samples, a digest and their values. The
digest covers the record and the digest before it, so that a changed, missing, foreign or truncated
record ends the part that is used: SIGKILL loses one batch.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import numpy as np

from checkpoints import TensorFiles
from checkpoints.safetensors_files import sha256_of_array, write_safetensors
from files.atomic_writing import wrap_write_errors, write_file_atomically
from files.errors import FileError, WriteError
from files.file_lock import open_lock, try_lock
from files.formatting import format_path
from files.text_files import check_regular_file
from terminal.screen import say

DRAFT = ".draft"
"""Suffix of a draft."""

Shape = tuple[int, int, int]
"""(samples, pairs in a sample, 2)."""

_LOGPS, _SHA256 = "logps", "sha256"
_COUNT = struct.Struct("<Q")
_DIGEST_BYTES = hashlib.sha256().digest_size


def write_logps_file(path: Path, logps: np.ndarray) -> None:
    """Write a complete cache file of log-probabilities.

    Raises:
        WriteError: the file cannot be written.
    """
    arrays = {
        _LOGPS: logps,
        _SHA256: np.frombuffer(bytes.fromhex(sha256_of_array(logps)), np.uint8),
    }
    write_file_atomically("the reference", path, lambda to: write_safetensors(to, arrays))


def read_logps_file(path: Path, shape: Shape) -> np.ndarray | None:
    """Read a complete cache file; None if it is missing, or damaged (with a warning)."""
    try:
        if not path.exists():
            return None
        files = TensorFiles([path])
        logps, sha256 = files[_LOGPS], files[_SHA256]
        if sha256.tobytes().hex() != sha256_of_array(logps) or not np.isfinite(logps).all():
            raise FileError("it is damaged")
        if logps.shape != shape or logps.dtype != np.float32:
            raise FileError("it is of other samples")
    except (OSError, KeyError, FileError) as error:
        say(f"warning: {format_path(path)} cannot be used: {error}")
        return None
    return logps


class _LastRecordEnd(NamedTuple):
    """End of a valid record in an unfinished cache file: samples and bytes so far, and SHA-256."""

    samples: int
    byte: int
    sha256: bytes


class LogpsDraftFile:
    """Unfinished cache file of log-probabilities (draft), which grows batch by batch.

    It is a cache: values that cannot be read are computed again, a failed write is a warning.
    """

    def __init__(self, path: Path, shape: Shape, writes: bool) -> None:
        """Read the draft, if there is one.

        Args:
            writes: True if this process appends to it; only one process at a time can.
        """
        self._path, self._file = path, None
        self._logps = np.empty(shape, np.float32)
        # The chain of digests starts with the name, so that a renamed draft is invalid.
        self._record_ends = [_LastRecordEnd(0, 0, hashlib.sha256(path.name.encode()).digest())]
        try:
            self._file = _open_locked(path) if writes else None
            self._read()
        except FileError as error:
            self._stop_writing(error)

    @property
    def num_samples(self) -> int:
        """Number of samples whose log-probabilities the unfinished file has."""
        return self._record_ends[-1].samples

    def truncate(self, samples: int) -> np.ndarray:
        """Truncate the unfinished file to at most `samples` samples, at the end of a record.

        Returns:
            Array of all values, of which only these are set.
        """
        while self.num_samples > samples:
            self._record_ends.pop()
        self._try_write(lambda file: os.ftruncate(file, self._record_ends[-1].byte))
        return self._logps

    def append(self, logps: np.ndarray) -> None:
        """Append the log-probabilities of the next samples to the unfinished file."""
        content = np.asarray(logps, "<f4", order="C").tobytes()
        head, last = _COUNT.pack(len(logps)), self._record_ends[-1]
        sha256 = _chain_digest(last.sha256, head, content)
        self._try_write(lambda file: _write_at(file, last.byte, head + sha256 + content))
        self._append_values(logps, sha256)

    def remove(self) -> None:
        """Delete the unfinished file, if this process appends to it."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def _append_values(self, logps: np.ndarray, sha256: bytes) -> None:
        samples, byte, _ = self._record_ends[-1]
        end = samples + len(logps)
        self._logps[samples:end] = logps
        record = _COUNT.size + _DIGEST_BYTES + 4 * logps.size
        self._record_ends.append(_LastRecordEnd(end, byte + record, sha256))

    def _read(self) -> None:
        """Read all valid records of the unfinished file."""
        if not self._path.exists():
            return
        check_regular_file(self._path)
        try:
            with self._path.open("rb") as file:
                while self._read_record(file):
                    pass
        except OSError as error:
            reason = error.strerror or error
            raise FileError(f"cannot read {format_path(self._path)}: {reason}") from error

    def _read_record(self, file: BinaryIO) -> bool:
        """Read the unfinished file's next record; returns False if it is missing or invalid."""
        head, sha256 = file.read(_COUNT.size), file.read(_DIGEST_BYTES)
        if len(sha256) < _DIGEST_BYTES:
            return False
        (count,), values = _COUNT.unpack(head), self._logps[self.num_samples :]
        if 0 < count <= len(values):
            content = file.read(values[:count].nbytes)
            if len(content) < values[:count].nbytes:
                return False
            if sha256 == _chain_digest(self._record_ends[-1].sha256, head, content):
                self._append_values(
                    np.frombuffer(content, "<f4").reshape(values[:count].shape), sha256
                )
                return True
        say(
            f"warning: {format_path(self._path)} is damaged: the samples after the first "
            f"{self.num_samples} are computed again"
        )
        return False

    def _try_write(self, action: Callable[[int], object]) -> None:
        """Change the unfinished file, if this process appends to it and no write has failed."""
        if self._file is None:
            return
        try:
            with wrap_write_errors("the reference", self._path):
                action(self._file)
        except WriteError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: FileError) -> None:
        say(f"warning: {error}: a run that is broken off computes the reference again")
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def remove_stale_drafts(folder: Path) -> None:
    """Delete unfinished cache files in a folder that no process appends to."""
    with suppress(OSError):
        for path in folder.glob(f"*{DRAFT}"):
            with suppress(FileError, OSError):
                file = _open_locked(path)
                if file is not None:
                    os.close(file)
                    path.unlink()


def _open_locked(path: Path) -> int | None:
    """Open or create an unfinished cache file and lock it; None if another process has the lock.

    Raises:
        FileError: it cannot be created.
    """
    if path.exists():
        check_regular_file(path)  # opening a pipe would block
    with wrap_write_errors("the reference", path):
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
    return hashlib.sha256(previous_sha256 + head + content).digest()
