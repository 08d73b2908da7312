"""Free memory of this host."""

from __future__ import annotations

import os
from pathlib import Path

from popxl._devices.cgroups import cgroup_free_bytes

_MEMINFO = Path("/proc/meminfo")


def free_host_bytes() -> int | None:
    """Returns the bytes that processes of this host or container can still allocate.

    None if unknown. Cached files count as free.
    """
    limits = [_available_bytes(), cgroup_free_bytes()]
    return min((n for n in limits if n is not None), default=None)


def _available_bytes() -> int | None:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
