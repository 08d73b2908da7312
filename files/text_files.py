"""Reading of regular files with size limits, as bytes or UTF-8 text; pointers of git-lfs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from files.errors import FileError
from files.file_location import FileLocation
from files.formatting import format_path

MEBIBYTE = 2**20
_LFS_START = b"version https://git-lfs.github.com/spec/"


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Read the bytes of a regular file.

    Args:
        max_bytes: bytes above which it is refused, unread.

    Raises:
        FileError: it is not there, cannot be read, is no regular file, or is too large.
    """
    name, size = format_path(path), check_regular_file(path)
    if size > max_bytes:
        raise FileError(
            f"cannot read {name}: it has {size:,} bytes, more than the {max_bytes:,} that such a "
            "file may have"
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {name}: {error.strerror or error}") from None


def check_regular_file(path: Path) -> int:
    """Check that a path is a regular file; returns the size in bytes.

    Raises:
        FileError: it is not there or no regular file.
    """
    name = format_path(path)
    try:
        status = os.stat(path)
    except OSError as error:
        raise FileError(f"cannot read {name}: {error.strerror or error}") from None
    except ValueError:  # such as a zero character
        raise FileError(f"cannot read {name}: no file can have this name") from None
    if stat.S_ISDIR(status.st_mode):
        raise FileError(f"cannot read {name}: it is a folder")
    if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for, a device has no end
        raise FileError(f"cannot read {name}: it is not a regular file")
    return status.st_size


def read_text(path: Path, max_bytes: int = 64 * MEBIBYTE) -> str:
    """Read a UTF-8 file as text, without a leading byte order mark.

    Raises:
        FileError: as `read_bytes`, or it is not UTF-8, or holds a zero character.
    """
    return decode_text(read_bytes(path, max_bytes), path)


def decode_text(data: bytes, path: Path, first_line: int = 1) -> str:
    """Decode bytes of a file as UTF-8.

    Args:
        first_line: number of the line they start at, for messages.

    Raises:
        FileError: they are not UTF-8, or hold a zero character.
    """
    try:
        text = data.decode("utf-8-sig" if first_line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise _decoding_error(path, first_line, data[: error.start], "is not UTF-8 text") from None
    if "\0" in text:
        offset = data.index(b"\0")
        raise _decoding_error(
            path, first_line, data[:offset], "has a zero character: it is damaged, or no text"
        )
    return text


def _decoding_error(path: Path, first_line: int, preceding: bytes, problem: str) -> FileError:
    line = first_line + preceding.count(b"\n")
    return FileError(f"{FileLocation(path, line)}: {problem}")


def check_not_lfs_pointer(path: Path, start: bytes | None = None) -> None:
    """Raise FileError if a file is a git-lfs pointer, not the content.

    Args:
        start: its first bytes; None: they are read.
    """
    if start is None:
        try:
            with path.open("rb") as file:
                start = file.read(len(_LFS_START))
        except OSError:  # who reads the file says it
            return
    if start.startswith(_LFS_START):
        raise FileError(
            f"{format_path(path)} is a pointer of git-lfs, not the file itself: run `git lfs pull` "
            "in its folder, or download the file"
        )
