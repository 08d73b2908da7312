"""Lock that allows only one process to write into a folder.

The lock is on a file in the folder. The file stays and says who had it last.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from files.atomic_writing import wrap_write_errors
from files.errors import FileError, InUseError
from files.file_lock import open_lock, try_lock
from files.formatting import format_name, format_path
from files.json_files import JsonObject, parse_json
from files.temp_folders import remove_stale_folders

LOCK_FILE = "writer.lock"


@contextmanager
def lock_folder(folder: Path, wait: bool = False) -> Iterator[None]:
    """Lock a folder against other writers, and delete stale temporary folders in it.

    The folder is created if missing. A file system without locks does not stop other writers.

    Args:
        wait: until another process that writes into it has ended.

    Raises:
        InUseError: another process writes into it.
        WriteError: it cannot be written.
    """
    with wrap_write_errors("the folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = open_lock(folder / LOCK_FILE)
    try:
        _acquire_lock(descriptor, folder, wait)
        _remove_stale_folders(folder)
        yield
    finally:
        os.close(descriptor)


def _remove_stale_folders(folder: Path) -> None:
    """Delete temporary folders of killed processes in a folder and its subfolders."""
    remove_stale_folders(folder)
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                remove_stale_folders(path)


def _acquire_lock(descriptor: int, folder: Path, wait: bool) -> None:
    with wrap_write_errors("the lock of", folder):
        is_locked = try_lock(descriptor, wait)
    if is_locked is None:
        return
    if not is_locked:
        holder = _describe_lock_holder(os.pread(descriptor, 4096, 0), folder / LOCK_FILE)
        raise InUseError(
            f"{format_path(folder)} is in use: {holder} writes into it; "
            "end that one first, or give another folder"
        )
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    note = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
    with wrap_write_errors("the lock of", folder):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(note).encode(), 0)


def _describe_lock_holder(content: bytes, path: Path) -> str:
    """Describe the process that holds a lock, from the content of the lock file."""
    try:
        holder = JsonObject(parse_json(content.decode(errors="replace"), path), str(path))
        process = holder.get_count("process")
        host = holder.get_text("host")
        since = holder.get_text("since")
    except FileError:
        return "another process"
    return f"process {process} on {format_name(host)}, since {format_name(since)},"
