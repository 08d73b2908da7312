"""Folder of the executable cache: whom its files are trusted from, and its size limit.

Only files of this user or root are loaded. The least recently used files are deleted first.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from popxl._ir.log import logger

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

SUFFIX, PARTIAL_SUFFIX = ".popxl", ".part"
"""Of an executable, and of one that is being written."""

_VARIABLE = "POPXL_CACHE_GB"
_DEFAULT = 20.0
_WRITTEN_WITHIN = 3600  # seconds


def max_cache_bytes() -> float:
    """Returns the cache's size limit in bytes: `POPXL_CACHE_GB` gigabytes, default 20.

    Raises:
        ValueError: the variable is not a number, or negative.
    """
    setting = os.environ.get(_VARIABLE) or _DEFAULT
    with suppress(ValueError):
        if (gigabytes := float(setting)) >= 0:
            return gigabytes * 1e9
    raise ValueError(
        f"the environment variable {_VARIABLE} is {setting!r}, but must be a number of gigabytes"
    )


def prune_cache(folder: Path, max_bytes: float) -> None:
    """Deletes the least recently used executables above `max_bytes`, and stale unfinished files.

    Raises:
        OSError: the folder cannot be read.
    """
    files = []
    for path in folder.iterdir():
        with suppress(OSError):  # another process has deleted it
            status = path.stat()
            if path.suffix == SUFFIX:
                files.append((status.st_mtime, status.st_size, path))
            elif path.suffix == PARTIAL_SUFFIX and time.time() - status.st_mtime > _WRITTEN_WITHIN:
                path.unlink()
    excess = sum(size for _, size, _ in files) - max_bytes
    for _, size, path in sorted(files):
        if excess <= 0:
            return
        with suppress(OSError):
            path.unlink()
        logger.info("deleted %s from the cache, which is full", path.name)
        excess -= size


def distrust_reason(status: os.stat_result) -> str | None:
    """Returns how a cache file's owner or mode lets another user change it; None if not at all.

    Args:
        status: its owner and mode.
    """
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to another user, {status.st_uid}"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return "other users can write to it (chmod go-w takes that away)"
    return None


def folder_distrust_reason(folder: Path) -> str | None:
    """Returns the reason not to trust a cache folder; None if it is trusted or does not exist."""
    try:
        return distrust_reason(folder.stat())
    except OSError:
        return None
