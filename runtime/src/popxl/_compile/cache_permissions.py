"""Whose executables are run: those that this user or root wrote where nobody else can."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def distrust_reason(found: os.stat_result) -> str | None:
    """Returns why another user may have changed a file or a folder; None: nobody can.

    Args:
        found: its owner and mode.
    """
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to another user, {found.st_uid}"
    if found.st_mode & _OTHERS:
        return "other users can write to it (chmod go-w takes that away)"
    return None


def folder_distrust_reason(folder: Path) -> str | None:
    """Returns why a folder's files are not to be run; None: they are, or it is still to be made."""
    try:
        return distrust_reason(folder.stat())
    except OSError:
        return None
