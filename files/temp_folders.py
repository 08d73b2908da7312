"""Temporary folders next to the destination of an atomic write.

A draft is locked (flock) while its process lives. One whose lock is free was left by a process that
was killed: whoever next writes into the folder, or opens the run there, deletes it. This does not
depend on process numbers, which containers and hosts that share a disk use more than once.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from files.file_lock import open_lock, try_lock

_NAME = re.compile(r"\.[0-9a-f]{16}\.draft")
_LOCK = "lock"


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Context with a temporary path to write to, renamed to the path `target` at the end.

    The path has the name of `target`. If the context fails, what was written is deleted.

    Raises:
        OSError: the draft cannot be made, flushed or renamed.
    """
    with temp_folder(target.parent) as folder:
        temp_path = folder / target.name
        yield temp_path
        for path in (*temp_path.rglob("*"), temp_path):
            fsync(path)
        os.replace(temp_path, target)
        fsync(target.parent)


@contextmanager
def temp_folder(parent: Path) -> Iterator[Path]:
    """Context with a hidden temporary folder in `parent`, deleted at the end.

    If the process is killed, the next writer deletes the folder.

    Raises:
        OSError: it cannot be made.
    """
    remove_stale_folders(parent)
    folder, lock = _create_locked(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_stale_folders(folder: Path) -> None:
    """Delete temporary folders that ended processes left in a folder; errors are ignored."""
    with suppress(OSError):
        for temp_folder in folder.iterdir():
            if _NAME.fullmatch(temp_folder.name):
                with suppress(OSError):
                    _remove_if_unlocked(temp_folder)


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create_locked(parent: Path) -> tuple[Path, int]:
    """Create and lock a temporary folder; returns its path and the lock's file descriptor."""
    while True:
        folder = parent / f".{secrets.token_hex(8)}.draft"
        folder.mkdir()
        try:
            lock = open_lock(folder / _LOCK)
        except FileNotFoundError:  # another process found it unlocked, and deleted it
            continue
        if try_lock(lock) is not False and os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)


def _remove_if_unlocked(temp_folder: Path) -> None:
    lock = open_lock(temp_folder / _LOCK)
    try:
        if try_lock(lock):
            shutil.rmtree(temp_folder)
    finally:
        os.close(lock)
