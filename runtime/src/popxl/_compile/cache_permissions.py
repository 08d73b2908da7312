"""Permissions of the executable cache: only files of this user or root are loaded."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def distrust_reason(found: os.stat_result) -> str | None:
    """Returns why another user could have changed a file or folder; None if nobody could.

    Args:
        found: its owner and mode.
    """
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to another user, {found.st_uid}"
    if found.st_mode & _OTHERS:
        return "other users can write to it (chmod go-w takes that away)"
    return None


def folder_distrust_reason(folder: Path) -> str | None:
    """Returns why a cache folder is not trusted; None if it is trusted or does not exist."""
    try:
        return distrust_reason(folder.stat())
    except OSError:
        return None
