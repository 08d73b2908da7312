"""Checks before compilation that a program fits host and device memory."""

from __future__ import annotations

import ctypes
import math
import os
from contextlib import suppress

import popdist
import popxl
from config.errors import ConfigError
from config.sections import RunConfig
from modelling import devices
from popxl import hardware
from popxl.session import DeviceDesc

MAX_VIRTUAL = 1024
"""Largest number of virtual CPU devices: each has threads; 8,000 take seconds and a gigabyte."""

_MMAP_THRESHOLD, _BLOCK = -3, 2**20  # M_MMAP_THRESHOLD of glibc's malloc.h
_FAR = 4  # temporaries are not planned where memory exceeds the state by this factor


class NotEnoughMemoryError(Exception):
    """Raised if a program needs more host or device memory than there is.

    Attributes:
        place: "host", "device", "host and disk", or "limit": `execution.host_memory`.
        needed, available: bytes; those of the device are of one device.
        parts: text that lists the needed bytes.
        disk: bytes of disk with which it would fit; None: it would not.
    """

    def __init__(
        self, place: str, needed: int, available: int, parts: str, disk: int | None = None
    ) -> None:
        self.place, self.needed, self.available, self.parts = place, needed, available, parts
        self.disk = disk
        super().__init__(f"needs {needed} bytes of {place} memory, of which {available} are there")


def release_freed_memory() -> None:
    """Make malloc return freed blocks of a megabyte or more to the operating system at once.

    This is glibc's mallopt, unless the environment sets its threshold. Without it the heap keeps
    free blocks between used ones, and a run takes more memory than planned. Fresh pages cost time,
    so only runs with a memory limit call this.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    with suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _BLOCK)


def check_lower_bound(config: RunConfig) -> None:
    """Raise NotEnoughMemoryError if a lower bound on the program's memory exceeds the host's.

    Devices with memory of their own can hold a part, with `execution.placement` auto.

    Raises:
        NotEnoughMemoryError: the host has less memory.
        ConfigError: more virtual devices than a host can start.
    """
    e, platform = config.execution, devices.resolve_device_desc(config)
    if config.num_replicas > MAX_VIRTUAL and popxl.plan.device_memory(platform, 1) is None:
        raise ConfigError(
            f"execution.data_parallel {e.data_parallel} × tensor_parallel {e.tensor_parallel} are "
            f"{config.num_replicas} devices, but a CPU stands in for {MAX_VIRTUAL} at most: lower "
            "them, or use a machine that has the devices"
        )
    available, instances = available_host_bytes(), popdist.getNumInstances()
    if available is not None:
        required = {name: n // instances for name, n in config.min_bytes().items()}
        if e.placement == "auto" and devices.resolve_platform(config) != "cpu":
            device = popxl.plan.device_memory(platform, config.num_replicas, instances) or 0
            required["less what devices hold"] = -device * (config.num_replicas // instances)
        if e.disk is None:
            excess = max(sum(required.values()) - available, 0)
            require_memory("host", required, available, excess)
        else:
            from planning.hardware.file_systems import free_disk_bytes

            require_memory("host and disk", required, available + free_disk_bytes(e.disk))


def check_memory(
    ir: popxl.Ir,
    device_desc: DeviceDesc,
    shared_bytes: int | None = None,
    host_bytes: int | None = None,
) -> None:
    """Raise NotEnoughMemoryError if the state of a program does not fit host or devices.

    Args:
        shared_bytes: bytes of host memory of the program whose weights this one shares; None: it
            shares none.
        host_bytes: bytes of host memory for this process; None: the free ones.

    Raises:
        DeviceError: fewer devices than replicas.
    """
    instances = popdist.getNumInstances()
    device = popxl.plan.device_memory(device_desc, ir.replication_factor, instances)
    stored, replicas = popxl.plan.storage_of(ir), ir.instance_replication_factor
    required = {
        "remote buffers": (stored.remote - shared_weight_bytes(ir, shared_bytes)) * replicas
    }
    if shared_bytes:
        required["the other program"] = shared_bytes
    available = host_bytes
    if host_bytes is None and (free := available_host_bytes()) is not None:
        available = free if device is None else int(hardware.MAX_PINNED * free)
    if device is None:  # devices share the host's memory
        required["the devices' variables"] = (stored.variables + stored.streams) * replicas
    if available is not None:
        if device is None and sum(required.values()) * _FAR > available:
            required["intermediate values"] = popxl.plan.plan_of(ir).temporaries * replicas
        require_memory("host", required, available)
    if device is not None:
        plan = popxl.plan.plan_of(ir)
        on_device = {"intermediate values": plan.temporaries, "variables": plan.variables}
        require_memory("device", on_device | {"host streams": plan.streams}, device)


def shared_weight_bytes(ir: popxl.Ir, shared_bytes: int | None) -> int:
    """Return the bytes of one replica's weights that another program shares; 0 if none.

    Shared weights are in remote buffers; `shared_bytes` is as for `check_memory`.
    """
    if shared_bytes is None:
        return 0
    return sum(
        math.prod(b.tensor_shape) * b.tensor_dtype.itemsize * (b.entries - len(b.on_disk_entries))
        for b in ir.remote_buffers
        if b.kind == "weights"
    )


def require_memory(
    place: str, required: dict[str, int], available: int, disk: int | None = None
) -> None:
    """Raise NotEnoughMemoryError if the sum of the required bytes exceeds the available ones."""
    needed = sum(required.values())
    if needed > available:
        largest = sorted(required.items(), key=lambda item: -item[1])[:2]
        parts = ", ".join(f"{n / 1e9:.1f} GB {what}" for what, n in largest if n >= 1e8)
        raise NotEnoughMemoryError(place, needed, available, parts or "all of it small", disk)


def available_host_bytes() -> int | None:
    """Return the bytes that this process or its container can still allocate; None if unknown.

    The processes of a host share its memory equally.
    """
    free = hardware.free_host_bytes()
    return None if free is None else free // popdist.local_process_count()
