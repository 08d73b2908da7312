"""Whether a program's state fits, before anything is compiled or allocated."""

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
from planning.hardware.file_systems import free_disk_bytes
from popxl import hardware
from popxl.session import DeviceDesc

MAX_VIRTUAL = 1024
"""Most virtual CPU devices. Each has threads of its own; 8,000 take seconds and a gigabyte."""

_MMAP_THRESHOLD, _BLOCK = -3, 2**20  # M_MMAP_THRESHOLD of glibc's malloc.h
_FAR = 4  # where memory exceeds the state by this factor, the rest need not be planned


class NotEnoughMemoryError(Exception):
    """A program that does not fit.

    Attributes:
        place: "host", "device", "host and disk", or "limit": what `execution.host_memory` allows.
        needed, available: bytes; those of the device are of one device.
        parts: what the needed bytes are, in words.
        disk: bytes of a disk with which it would fit; None: with none.
    """

    def __init__(
        self, place: str, needed: int, available: int, parts: str, disk: int | None = None
    ) -> None:
        self.place, self.needed, self.available, self.parts = place, needed, available, parts
        self.disk = disk
        super().__init__(f"needs {needed} bytes of {place} memory, of which {available} are there")


def return_freed_blocks() -> None:
    """From here on, let blocks of a megabyte go back to the system as soon as they are free, where
    the C library can do so (glibc's mallopt), unless the environment sets its threshold.

    Else its heap keeps what lies between blocks that are in use, and a run takes more than is
    planned. Each block's fresh pages cost time: only runs with a limit do it.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    with suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _BLOCK)


def check_lower_bound(config: RunConfig) -> None:
    """Check lower bounds against the host's memory, before anything is built.

    Devices with memory of their own may hold a part, if `execution.placement` lets them.

    Raises:
        NotEnoughMemoryError: they do not.
        ConfigError: more virtual devices than a host can start.
    """
    e, platform = config.execution, devices.device_desc(config)
    if config.replicas > MAX_VIRTUAL and popxl.plan.device_memory(platform, 1) is None:
        raise ConfigError(
            f"execution.data_parallel {e.data_parallel} × tensor_parallel {e.tensor_parallel} are "
            f"{config.replicas} devices, but a CPU stands in for {MAX_VIRTUAL} at most: lower "
            "them, or use a machine that has the devices"
        )
    available, instances = host_memory(), popdist.getNumInstances()
    if available is not None:
        own = {what: n // instances for what, n in config.min_bytes().items()}
        if e.placement == "auto" and devices.platform(config) != "cpu":
            device = popxl.plan.device_memory(platform, config.replicas, instances) or 0
            own["less what devices hold"] = -device * (config.replicas // instances)
        if e.disk is None:
            require_memory("host", own, available, max(sum(own.values()) - available, 0))
        else:
            require_memory("host and disk", own, available + free_disk_bytes(e.disk))


def check_memory(
    ir: popxl.Ir,
    device_desc: DeviceDesc,
    shared_bytes: int | None = None,
    host_bytes: int | None = None,
) -> None:
    """Raise NotEnoughMemoryError if the state of a program does not fit host or devices.

    Args:
        shared_bytes: of host memory, what the program takes that lends this one its weights; None:
            its weights are its own.
        host_bytes: bytes of host memory for this process; None: what is free.

    Raises:
        DeviceError: fewer devices than replicas.
    """
    instances = popdist.getNumInstances()
    device = popxl.plan.device_memory(device_desc, ir.replication_factor, instances)
    stored, replicas = popxl.plan.storage_of(ir), ir.instance_replication_factor
    needs = {"remote buffers": (stored.remote - shared_weight_bytes(ir, shared_bytes)) * replicas}
    if shared_bytes:
        needs["the other program"] = shared_bytes
    available = host_bytes
    if host_bytes is None and (free := host_memory()) is not None:
        available = free if device is None else int(hardware.MAX_PINNED * free)
    if device is None:  # devices share the host's memory
        needs["the devices' variables"] = (stored.variables + stored.streams) * replicas
    if available is not None:
        if device is None and sum(needs.values()) * _FAR > available:
            needs["intermediate values"] = popxl.plan.plan_of(ir).temporaries * replicas
        require_memory("host", needs, available)
    if device is not None:
        plan = popxl.plan.plan_of(ir)
        on_device = {"intermediate values": plan.temporaries, "variables": plan.variables}
        require_memory("device", on_device | {"host streams": plan.streams}, device)


def shared_weight_bytes(ir: popxl.Ir, shared_bytes: int | None) -> int:
    """Bytes of the weights in remote buffers, on one replica, that another program lends; 0 if
    `shared_bytes`, as for `check_memory`, is None."""
    if shared_bytes is None:
        return 0
    return sum(
        math.prod(b.tensor_shape) * b.tensor_dtype.itemsize * (b.entries - len(b.on_disk_entries))
        for b in ir.remote_buffers
        if b.kind == "weights"
    )


def require_memory(
    place: str, needs: dict[str, int], available: int, disk: int | None = None
) -> None:
    """Raise NotEnoughMemoryError if the bytes that are needed, by what they are, are not there."""
    needed = sum(needs.values())
    if needed > available:
        largest = sorted(needs.items(), key=lambda item: -item[1])[:2]
        parts = ", ".join(f"{n / 1e9:.1f} GB {what}" for what, n in largest if n >= 1e8)
        raise NotEnoughMemoryError(place, needed, available, parts or "all of it small", disk)


def host_memory() -> int | None:
    """Bytes that this process can still allocate, within its container if it has one; None if
    unknown. Processes of a host share its memory.
    """
    free = hardware.host_memory()
    return None if free is None else free // popdist.local_process_count()
