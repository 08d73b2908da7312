"""Size limit of the executable cache: least recently used files are deleted first."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from popxl._ir.log import logger

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
