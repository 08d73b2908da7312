"""Whether a program's state fits, before anything is compiled or allocated."""

from __future__ import annotations

import os
from pathlib import Path

import popxl
from popxl.session import DeviceDesc

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


class NotEnoughMemoryError(Exception):
    """A program that does not fit.

    Attributes:
        place: "host" or "device".
        needed, available: bytes; those of the device are of one device.
        parts: what the needed bytes are, in words.
    """

    def __init__(self, place: str, needed: int, available: int, parts: str) -> None:
        self.place, self.needed, self.available, self.parts = place, needed, available, parts
        super().__init__(f"needs {needed} bytes of {place} memory, of which {available} are there")


def check_memory(ir: popxl.Ir, device_desc: DeviceDesc) -> None:
    """Raise NotEnoughMemoryError if the state of a program does not fit host or devices.

    Raises:
        DeviceError: fewer devices than replicas.
    """
    device = popxl.plan.device_memory(device_desc, ir.replication_factor)
    stored, replicas = popxl.plan.storage_of(ir), ir.instance_replication_factor
    remote = stored.remote * replicas
    parts = f"{_size(remote)} remote buffers, {_size(stored.host_copies)} the host's variables"
    needed = remote + stored.host_copies
    if device is None:  # devices share the host's memory
        own = (stored.variables + stored.streams) * replicas
        needed, parts = needed + own, f"{parts}, {_size(own)} the devices'"
    available = host_memory()
    if available is not None and needed > available:
        raise NotEnoughMemoryError("host", needed, available, parts)
    if device is not None:
        _check_device(popxl.plan.plan_of(ir), device)


def _check_device(plan: popxl.plan.Plan, available: int) -> None:
    if plan.device > available:
        parts = f"{_size(plan.temporaries)} intermediate values, {_size(plan.variables)} variables"
        raise NotEnoughMemoryError("device", plan.device, available, parts)


def host_memory() -> int | None:
    """Bytes that this process can still take, also within a container; None if not known."""
    found = [_physical(), _within_limit()]
    return min((n for n in found if n is not None), default=None)


def _physical() -> int | None:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _within_limit() -> int | None:
    """What the control group of the process has left; files in memory can be thrown out."""
    try:
        limit, used = (int((_GROUP / f"memory.{n}").read_text()) for n in ("max", "current"))
        facts = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        return limit - used + int(facts["inactive_file"])
    except (OSError, ValueError, KeyError):  # there is none, or its limit is "max"
        return None


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
