"""Offload of training state to disk: the remote-buffer entries that are in files.

Entries that are read least often go to disk first: the moments, which a step reads and writes once;
then the gradients, the activations, and at last the weights, which each pass reads. Offload changes
no bit of a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import popdist
import popxl
from config.sections import RunConfig
from modelling.devices import resolve_device_desc
from planning.hardware.memory_check import (
    NotEnoughMemoryError,
    available_host_bytes,
    check_memory,
    require_memory,
    shared_weight_bytes,
)

OFFLOAD_ORDER = ("moments", "gradients", "", "weights")
"""`RemoteBuffer.kind` in the order of offload; "": the others, activations and inputs."""

MIN_ENTRY_BYTES = 2**16
"""Bytes of the smallest entry that is offloaded: smaller ones are not worth a request."""

PROCESS_BYTES = 7 * 10**8
"""Bytes of host memory that Python, JAX and a compiled program take without any state."""

IO_BUFFERS = 4 * popxl.plan.DISK_WINDOW
"""Bytes of host memory for disk transfers: reads ahead, pending writes, and blocks and arrays that
are reused."""


def offload_if_needed(config: RunConfig, ir: popxl.Ir, shared_bytes: int | None = None) -> None:
    """Offload the state that exceeds host memory to disk if `execution.disk` names a folder.

    Host memory is the free one, or `execution.host_memory`; the memory of virtual devices counts,
    too.

    Args:
        shared_bytes: see `check_memory`; shared weights are not offloaded.
    """
    if config.execution.disk is not None:
        _offload_excess(config, ir, shared_bytes)


def offload_compiled_program(
    config: RunConfig, session: popxl.Session, shared_bytes: int | None = None
) -> None:
    """Offload more remote-buffer entries if the compiled program needs more than estimated.

    Call it before the session is entered, which places the state; arguments as for
    `offload_if_needed`.
    """
    if config.execution.disk is not None and _shares_host_memory(config, session.ir):
        _offload_excess(config, session.ir, shared_bytes, session.memory_use().device_bytes)


def check_fits_memory(config: RunConfig, ir: popxl.Ir, shared_bytes: int | None = None) -> None:
    """Raise NotEnoughMemoryError if a program with its disk offload exceeds host or device memory.

    Raises:
        DeviceError: fewer devices than replicas.
        NotEnoughMemoryError: has the bytes of disk with which the program would fit, if any.
    """
    desc = resolve_device_desc(config)
    check_memory_limit(config, ir, shared_bytes)
    try:
        check_memory(ir, desc, shared_bytes)
    except NotEnoughMemoryError as error:
        if error.place == "host" and config.execution.disk is None:
            _offload_excess(config, ir, shared_bytes)  # the program will not run
            with suppress(NotEnoughMemoryError):
                check_memory(ir, desc, shared_bytes)
                replicas = ir.instance_replication_factor
                error.disk = popxl.plan.storage_of(ir).disk * replicas
        raise


def io_buffer_bytes(config: RunConfig) -> int:
    """Return the bytes of the host buffers for disk reads and writes (`IO_BUFFERS`).

    Evaluation has no buffers for writes.
    """
    return IO_BUFFERS * 3 // 4 if config.model.eval else IO_BUFFERS


def check_memory_limit(config: RunConfig, ir: popxl.Ir, shared_bytes: int | None) -> None:
    """Raise NotEnoughMemoryError if `execution.host_memory` is exceeded with all possible offload.

    Raises:
        NotEnoughMemoryError: has the bytes that the program needs.
    """
    if config.execution.host_memory is None:
        return
    limit, replicas = round(config.execution.host_memory * 1e9), ir.instance_replication_factor
    stored = popxl.plan.storage_of(ir)
    parts = {
        "the program": PROCESS_BYTES,
        "what is on its way to and from the disk": io_buffer_bytes(config) if stored.disk else 0,
        "buffers": (stored.remote - shared_weight_bytes(ir, shared_bytes)) * replicas,
        "the other program": shared_bytes or 0,
    }
    if _shares_host_memory(config, ir):
        parts["the devices' variables and intermediate values"] = (
            popxl.plan.plan_of(ir).device_bytes * replicas
        )
    require_memory("limit", parts, limit)


def _shares_host_memory(config: RunConfig, ir: popxl.Ir) -> bool:
    """Return True if the devices use host memory, as virtual CPU devices do."""
    desc, replicas = resolve_device_desc(config), ir.replication_factor
    return popxl.plan.device_memory(desc, replicas, int(popdist.getNumInstances())) is None


def _offload_excess(
    config: RunConfig, ir: popxl.Ir, shared_bytes: int | None, device: int | None = None
) -> None:
    """Offload to disk the remote-buffer entries that exceed the usable host memory.

    Args:
        device: bytes on a device; None: estimate them.
    """
    free_bytes = usable_host_bytes(config)
    if free_bytes is None:
        return
    free_bytes -= shared_bytes or 0
    if _shares_host_memory(config, ir):
        device = popxl.plan.plan_of(ir).device_bytes if device is None else device
        free_bytes -= device * ir.instance_replication_factor
    offload_to_disk(ir, free_bytes, ir.instance_replication_factor, shared_bytes)


def offload_to_disk(
    ir: popxl.Ir, free_bytes: int, replicas: int, shared_bytes: int | None = None
) -> None:
    """Offload remote-buffer entries until a process needs at most `free_bytes` of host memory.

    Args:
        replicas: replicas of the process.
        shared_bytes: as for `offload_if_needed`.
    """
    storage = popxl.plan.storage_of(ir)
    stored = (storage.remote - shared_weight_bytes(ir, shared_bytes)) * replicas + PROCESS_BYTES
    if stored + (IO_BUFFERS if storage.disk else 0) > free_bytes:
        kinds = [kind for kind in OFFLOAD_ORDER if shared_bytes is None or kind != "weights"]
        _offload_entries(ir, kinds, stored + IO_BUFFERS - free_bytes, replicas)


def host_bytes_per_process(memory_use: popxl.plan.MemoryUse, replicas: int) -> int:
    """Return the host memory in bytes that a process with virtual devices takes.

    Args:
        replicas: replicas of this process.
    """
    return (
        PROCESS_BYTES
        + (memory_use.device_bytes + memory_use.remote) * replicas
        + (IO_BUFFERS if memory_use.disk else 0)
    )


def usable_host_bytes(config: RunConfig) -> int | None:
    """Return the bytes of host memory that this process may use; None if unknown."""
    limit = config.execution.host_memory
    return available_host_bytes() if limit is None else round(limit * 1e9)


def _offload_entries(ir: popxl.Ir, kinds: Sequence[str], excess: int, replicas: int) -> None:
    """Offload to disk remote-buffer entries of `excess` bytes in total, or all large ones."""
    for kind in kinds:
        for buffer in ir.remote_buffers:
            nbytes = math.prod(buffer.tensor_shape) * buffer.tensor_dtype.itemsize * replicas
            movable = max(buffer.entries - buffer.resident - buffer.on_disk, 0)
            buffer_kind = buffer.kind if buffer.kind in OFFLOAD_ORDER else ""
            if buffer_kind == kind and excess > 0 and nbytes >= MIN_ENTRY_BYTES * replicas:
                count = min(movable, math.ceil(excess / nbytes))
                buffer.on_disk += count
                excess -= count * nbytes
