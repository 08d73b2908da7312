"""Which entries of a program's remote buffers lie in host memory, and which on disk.

What is moved least often for its size goes to disk first: the moments, which a step reads and
writes once; then the gradients, the rows of activations, and at last the weights, which each pass
reads. Placement changes no bit of a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import popdist
import popxl
from config.sections import RunConfig
from modelling.devices import device_desc
from planning.hardware.memory_check import (
    NotEnoughMemoryError,
    check_memory,
    host_memory,
    require_memory,
    shared_weight_bytes,
)

OFFLOAD_ORDER = ("moments", "gradients", "", "weights")
"""`RemoteBuffer.kind` in the order of going to disk; "": all others, activations and inputs."""

MIN_ENTRY_BYTES = 2**16
"""Size from which an entry is worth a request to a disk, in bytes."""

PROCESS_BYTES = 7 * 10**8
"""Bytes that Python, JAX and a compiled program take without any state."""

IO_BUFFERS = 4 * popxl.plan.DISK_WINDOW
"""Bytes that are read ahead, that are written behind, and that are kept to be used again: blocks of
memory, and arrays."""


def offload_if_needed(config: RunConfig, ir: popxl.Ir, shared_bytes: int | None = None) -> None:
    """Put what host memory cannot hold on disk, if `execution.disk` names a folder.

    Args:
        shared_bytes: see `check_memory`; what is lent stays where it is.

    Host memory is what is free, or `execution.host_memory`. Where devices are virtual, what they
    hold is in it as well.
    """
    if config.execution.disk is not None:
        _offload_excess(config, ir, shared_bytes)


def offload_compiled(
    config: RunConfig, session: popxl.Session, shared_bytes: int | None = None
) -> None:
    """Put more on disk if the compiled program takes more memory than `offload_if_needed` expected.

    Call it before the session is entered, as state is placed then; arguments as for
    `offload_if_needed`.
    """
    if config.execution.disk is not None and _shares_host_memory(config, session.ir):
        _offload_excess(config, session.ir, shared_bytes, session.memory_use().device)


def check_fits(config: RunConfig, ir: popxl.Ir, shared_bytes: int | None = None) -> None:
    """Check that a program fits as it is placed; arguments as for `offload_if_needed`.

    Raises:
        DeviceError: fewer devices than replicas.
        NotEnoughMemoryError: it does not; with the bytes of a disk that would help, if one would.
    """
    desc = device_desc(config)
    check_memory_limit(config, ir, shared_bytes)
    try:
        check_memory(ir, desc, shared_bytes)
    except NotEnoughMemoryError as error:
        if error.place == "host" and config.execution.disk is None:
            _offload_excess(config, ir, shared_bytes)  # nobody will run this program
            with suppress(NotEnoughMemoryError):
                check_memory(ir, desc, shared_bytes)
                replicas = ir.instance_replication_factor
                error.disk = popxl.plan.storage_of(ir).disk * replicas
        raise


def io_buffer_bytes(config: RunConfig) -> int:
    """Bytes of `IO_BUFFERS` that a program takes: what is not trained is not written."""
    return IO_BUFFERS * 3 // 4 if config.model.eval else IO_BUFFERS


def check_memory_limit(config: RunConfig, ir: popxl.Ir, shared_bytes: int | None) -> None:
    """Check that a process stays within `execution.host_memory`, with all on disk that can be.

    Raises:
        NotEnoughMemoryError: it does not; it names the least that is needed.
    """
    if config.execution.host_memory is None:
        return
    free_bytes, replicas = round(config.execution.host_memory * 1e9), ir.instance_replication_factor
    stored = popxl.plan.storage_of(ir)
    parts = {
        "the program": PROCESS_BYTES,
        "what is on its way to and from the disk": io_buffer_bytes(config) if stored.disk else 0,
        "buffers": (stored.remote - shared_weight_bytes(ir, shared_bytes)) * replicas,
        "the other program": shared_bytes or 0,
    }
    if _shares_host_memory(config, ir):
        parts["the devices' variables and intermediate values"] = (
            popxl.plan.plan_of(ir).device * replicas
        )
    require_memory("limit", parts, free_bytes)


def _shares_host_memory(config: RunConfig, ir: popxl.Ir) -> bool:
    """Whether the devices have no memory of their own."""
    desc, replicas = device_desc(config), ir.replication_factor
    return popxl.plan.device_memory(desc, replicas, _instances()) is None


def _offload_excess(
    config: RunConfig, ir: popxl.Ir, shared_bytes: int | None, device: int | None = None
) -> None:
    """Args: `device`: bytes on a device; None: what is estimated."""
    free_bytes = usable_host_bytes(config)
    if free_bytes is None:
        return
    free_bytes -= shared_bytes or 0
    if _shares_host_memory(config, ir):
        device = popxl.plan.plan_of(ir).device if device is None else device
        free_bytes -= device * ir.instance_replication_factor
    offload_to_disk(ir, free_bytes, ir.instance_replication_factor, shared_bytes)


def offload_to_disk(
    ir: popxl.Ir, free_bytes: int, replicas: int, shared_bytes: int | None = None
) -> None:
    """Put on disk what a process's state takes beyond so many bytes.

    Args:
        replicas: of the process.
        shared_bytes: as for `offload_if_needed`.
    """
    storage = popxl.plan.storage_of(ir)
    stored = (storage.remote - shared_weight_bytes(ir, shared_bytes)) * replicas + PROCESS_BYTES
    if stored + (IO_BUFFERS if storage.disk else 0) > free_bytes:
        kinds = [kind for kind in OFFLOAD_ORDER if shared_bytes is None or kind != "weights"]
        _offload_entries(ir, kinds, stored + IO_BUFFERS - free_bytes, replicas)


def process_bytes(use: popxl.plan.MemoryUse, replicas: int) -> int:
    """Bytes that a process with virtual devices takes.

    Args:
        replicas: of this process.
    """
    return PROCESS_BYTES + (use.device + use.remote) * replicas + (IO_BUFFERS if use.disk else 0)


def usable_host_bytes(config: RunConfig) -> int | None:
    """Bytes of host memory for this process; None if not known."""
    given = config.execution.host_memory
    return host_memory() if given is None else round(given * 1e9)


def _instances() -> int:
    return int(popdist.getNumInstances())


def _offload_entries(ir: popxl.Ir, kinds: Sequence[str], excess: int, replicas: int) -> None:
    """Put entries of so many more bytes on disk, or all that are worth it."""
    for kind in kinds:
        for buffer in ir.remote_buffers:
            nbytes = math.prod(buffer.tensor_shape) * buffer.tensor_dtype.itemsize * replicas
            movable = max(buffer.entries - buffer.resident - buffer.on_disk, 0)
            own = buffer.kind if buffer.kind in OFFLOAD_ORDER else ""
            if own == kind and excess > 0 and nbytes >= MIN_ENTRY_BYTES * replicas:
                more = min(movable, math.ceil(excess / nbytes))
                buffer.on_disk += more
                excess -= more * nbytes
