"""The file system that holds a folder, or will hold it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = {"tmpfs", "ramfs"}


def _existing(folder: str) -> Path:
    """The folder, or the next one above it that is there."""
    path = Path(folder).absolute()
    return next((p for p in (path, *path.parents) if p.exists()), path)


def free_disk_bytes(folder: str) -> int:
    """Bytes left there; 0 where nobody can tell."""
    try:
        return shutil.disk_usage(_existing(folder)).free
    except OSError:
        return 0


def is_in_memory(folder: str) -> bool:
    """Whether it has no disk; False where nobody can tell."""
    try:
        device = os.stat(_existing(folder)).st_dev
        mounts = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    rows = (line.split() for line in mounts)  # the type of the file system follows a "-"
    return any(row[2] == number and row[row.index("-") + 1] in _IN_MEMORY for row in rows)
