"""Permissions of the executable cache: only files of this user or root are loaded."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


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
