"""Free memory of this host, within the limits of control groups (v1, v2 and nested groups)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_PROC_CGROUP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")

# Files with the limit and what is used, and the cached files in `memory.stat`.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


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


def cgroup_free_bytes() -> int | None:
    """Returns the bytes that cgroup limits still allow; None without a limit.

    Cached files count as free.

    Slurm and systemd limit a group within another: the least of all counts.
    """
    limits = [_group_free_bytes(*group) for group in _cgroups_of_process()]
    return min((free_bytes for free_bytes in limits if free_bytes is not None), default=None)


def _cgroups_of_process() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yields each cgroup of this process, with the names of its memory limit and usage files."""
    try:
        lines = _PROC_CGROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = _MOUNT, _V2
        elif "memory" in controllers.split(","):
            root, names = _MOUNT / "memory", _V1
        else:
            continue
        # In a container the path may be the host's, which is not there; the root then is its own.
        parts = path.strip("/").split("/")
        if ".." in parts:  # outside of what is mounted
            parts = []
        for depth in range(len(parts) + 1):
            yield root.joinpath(*parts[:depth]), names


def _group_free_bytes(group: Path, names: tuple[str, str, str]) -> int | None:
    try:
        limit, used = (int((group / name).read_text()) for name in names[:2])
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + int(facts[names[2]])
    except (OSError, ValueError, KeyError):  # there is none, or its limit is "max"
        return None
