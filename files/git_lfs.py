"""Detection of git-lfs pointer files."""

from __future__ import annotations

from pathlib import Path

from files.errors import FileError
from files.formatting import format_path

_START = b"version https://git-lfs.github.com/spec/"


def check_not_lfs_pointer(path: Path, start: bytes | None = None) -> None:
    """Raise FileError if a file is a git-lfs pointer, not the content.

    Args:
        start: its first bytes; None: they are read.
    """
    if start is None:
        try:
            with path.open("rb") as file:
                start = file.read(len(_START))
        except OSError:  # who reads the file says it
            return
    if start.startswith(_START):
        raise FileError(
            f"{format_path(path)} is a pointer of git-lfs, not the file itself: run `git lfs pull` "
            "in its folder, or download the file"
        )
