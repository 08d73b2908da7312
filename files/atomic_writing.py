"""Atomic writing of files and folders, and early checks that they can be written."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from files.errors import UserError, WriteError
from files.formatting import format_path
from files.temp_folders import atomic_path, fsync

_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes, of Linux and of most of its file systems


@contextmanager
def unwrap_os_errors() -> Iterator[None]:
    """Convert a library's exception for a disk failure into the OSError that caused it.

    Those written in Rust, such as safetensors and tokenizers, raise exceptions of their own, whose
    text has its number.
    """
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:
        match = _OS_ERROR.search(str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), os.strerror(int(match[1]))) from error


@contextmanager
def wrap_write_errors(purpose: str, path: str | Path) -> Iterator[None]:
    """Convert an OSError inside the context into a WriteError of one sentence.

    Args:
        purpose: the file or folder is for, such as "the plan".

    Raises:
        WriteError: "cannot write {what} {path}: {reason}".
    """
    try:
        with unwrap_os_errors():
            yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise WriteError(f"cannot write {purpose} {format_path(path)}: {reason}") from error
    except ValueError as error:
        if "null" not in str(error):  # "embedded null byte", which no path can have
            raise
        raise WriteError(f"cannot write {purpose} {format_path(path)}: {error}") from error


def write_text_atomically(purpose: str, path: Path, text: str) -> None:
    """Write a text file atomically. Raises as `write_file_atomically`."""
    write_file_atomically(purpose, path, lambda draft: draft.write_text(text, encoding="utf-8"))


def write_folder_atomically(purpose: str, path: Path, fill: Callable[[Path], object]) -> None:
    """Write a folder atomically; raises if anything exists at `path`.

    Args:
        purpose: it is, for messages.
        fill: called with the path of an empty folder to fill.

    Raises:
        WriteError: it cannot be written; no draft is left.
    """
    with wrap_write_errors(purpose, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as draft:
            draft.mkdir()
            fill(draft)


def write_file_atomically(purpose: str, path: Path, write: Callable[[Path], object]) -> None:
    """Write or replace a file atomically; missing parent folders are created.

    Args:
        purpose: it is, for messages.
        write: called with the path of a draft to write.

    Raises:
        WriteError: it cannot be written; no draft is left.
    """
    with wrap_write_errors(purpose, path):
        if path.exists() and not path.is_file():  # such as /dev/stdout; a folder is an error
            write(path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # Through a link, which stays one, if it leads anywhere.
        with atomic_path(Path(os.path.realpath(path))) as draft:
            write(draft)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file and flush it to disk (fsync)."""
    write_synced(path, json.dumps(content, indent=2) + "\n")


def write_synced(path: Path, text: str) -> None:
    """Write a text file and flush it to disk (fsync)."""
    path.write_text(text, encoding="utf-8")
    fsync(path)


def check_can_write_file(purpose: str, path: str | Path) -> None:
    """Raise WriteError unless `write_file` can write to `path`; leaves no file behind."""
    path = Path(path)
    with wrap_write_errors(purpose, path):
        if _mode_for_new_file(path) is not None and stat.S_ISDIR(_mode_for_new_file(path) or 0):
            raise IsADirectoryError(errno.EISDIR, "it is a folder: name a file in it")
        if _mode_for_new_file(path) is None or stat.S_ISREG(_mode_for_new_file(path) or 0):
            _check_folder_is_writable(path.parent)
            _check_name_lengths(path)


def check_can_write_folder(purpose: str, path: str | Path) -> None:
    """Raise WriteError unless files can be written into a folder, which need not exist yet.

    Leaves nothing behind.
    """
    with wrap_write_errors(purpose, path):
        _check_folder_is_writable(Path(path))
        _check_name_lengths(Path(path))


def _check_folder_is_writable(folder: Path) -> None:
    """Write an unnamed file into a folder, or into its nearest existing parent."""
    absolute = Path(os.path.abspath(folder))
    if absolute.is_symlink() and not absolute.exists():
        raise FileNotFoundError(errno.ENOENT, "it is a link to nothing")
    existing = next(
        parent for parent in (absolute, *absolute.parents) if _mode_for_new_file(parent) is not None
    )
    if not stat.S_ISDIR(_mode_for_new_file(existing) or 0):
        raise NotADirectoryError(errno.ENOTDIR, f"{format_path(existing)} is not a folder")
    with tempfile.TemporaryFile(dir=existing) as probe:
        probe.write(b"\0" * 4096)
        probe.flush()


def _check_name_lengths(path: Path) -> None:
    absolute = os.path.abspath(path)
    longest_name = max(len(os.fsencode(name)) for name in Path(absolute).parts)
    if longest_name > _LONGEST_NAME or len(os.fsencode(absolute)) > _LONGEST_PATH:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))


def _mode_for_new_file(path: Path) -> int | None:
    """Type and permission bits of the file at a path; None if there is none yet."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
