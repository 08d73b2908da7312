"""The file system of a folder: its free bytes, and whether it is in memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = {"tmpfs", "ramfs"}


def _existing_parent(folder: str) -> Path:
    """Return the folder, or the closest parent folder that exists."""
    path = Path(folder).absolute()
    return next((p for p in (path, *path.parents) if p.exists()), path)


def free_disk_bytes(folder: str) -> int:
    """Return the free bytes of a folder's file system; 0 if unknown."""
    try:
        return shutil.disk_usage(_existing_parent(folder)).free
    except OSError:
        return 0


def is_in_memory(folder: str) -> bool:
    """Return True if a folder's file system is in memory (tmpfs); False if unknown."""
    try:
        device = os.stat(_existing_parent(folder)).st_dev
        mounts = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    entries = (line.split() for line in mounts)  # the type of the file system follows a "-"
    return any(e[2] == number and e[e.index("-") + 1] in _IN_MEMORY for e in entries)
