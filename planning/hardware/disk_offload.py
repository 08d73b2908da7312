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
    borrowed_bytes,
    check_memory,
    compare,
    host_memory,
)

KINDS = ("moments", "gradients", "", "weights")
"""`RemoteBuffer.kind` in the order of going to disk; "": all others, activations and inputs."""

MIN_ENTRY = 2**16
"""Size from which an entry is worth a request to a disk, in bytes."""

PROCESS = 7 * 10**8
"""Bytes that Python, JAX and a compiled program take without any state."""

WINDOWS = 4 * popxl.plan.DISK_WINDOW
"""Bytes that are read ahead, that are written behind, and that are kept to be used again: blocks of
memory, and arrays."""


def place(config: RunConfig, ir: popxl.Ir, lender_bytes: int | None = None) -> None:
    """Put what host memory cannot hold on disk, if `execution.disk` names a folder.

    Args:
        lender_bytes: see `check_memory`; what is lent stays where it is.

    Host memory is what is free, or `execution.host_memory`. Where devices are virtual, what they
    hold is in it as well.
    """
    if config.execution.disk is not None:
        _spill_over(config, ir, lender_bytes)


def place_compiled(
    config: RunConfig, session: popxl.Session, lender_bytes: int | None = None
) -> None:
    """Put more on disk if the compiled program takes more memory than `place` expected. Before the
    session is entered, as state is placed then; arguments as for `place`."""
    if config.execution.disk is not None and _shares_host_memory(config, session.ir):
        _spill_over(config, session.ir, lender_bytes, session.memory_use().device)


def check_placed(config: RunConfig, ir: popxl.Ir, lender_bytes: int | None = None) -> None:
    """Check that a program fits as it is placed; arguments as for `place`.

    Raises:
        DeviceError: fewer devices than replicas.
        NotEnoughMemoryError: it does not; with the bytes of a disk that would help, if one would.
    """
    desc = device_desc(config)
    check_limit(config, ir, lender_bytes)
    try:
        check_memory(ir, desc, lender_bytes)
    except NotEnoughMemoryError as error:
        if error.place == "host" and config.execution.disk is None:
            _spill_over(config, ir, lender_bytes)  # nobody will run this program
            with suppress(NotEnoughMemoryError):
                check_memory(ir, desc, lender_bytes)
                replicas = ir.instance_replication_factor
                error.disk = popxl.plan.storage_of(ir).disk * replicas
        raise


def windows(config: RunConfig) -> int:
    """Bytes of `WINDOWS` that a program takes: what is not trained is not written."""
    return WINDOWS * 3 // 4 if config.model.eval else WINDOWS


def check_limit(config: RunConfig, ir: popxl.Ir, lender_bytes: int | None) -> None:
    """Check that a process stays within `execution.host_memory`, with all on disk that can be.

    Raises:
        NotEnoughMemoryError: it does not; it names the least that is needed.
    """
    if config.execution.host_memory is None:
        return
    room, replicas = round(config.execution.host_memory * 1e9), ir.instance_replication_factor
    stored = popxl.plan.storage_of(ir)
    parts = {
        "the program": PROCESS,
        "what is on its way to and from the disk": windows(config) if stored.disk else 0,
        "buffers": (stored.remote - borrowed_bytes(ir, lender_bytes)) * replicas,
        "the other program": lender_bytes or 0,
    }
    if _shares_host_memory(config, ir):
        parts["the devices' variables and intermediate values"] = (
            popxl.plan.plan_of(ir).device * replicas
        )
    compare("limit", parts, room)


def _shares_host_memory(config: RunConfig, ir: popxl.Ir) -> bool:
    """Whether the devices have no memory of their own."""
    desc, replicas = device_desc(config), ir.replication_factor
    return popxl.plan.device_memory(desc, replicas, _instances()) is None


def _spill_over(
    config: RunConfig, ir: popxl.Ir, lender_bytes: int | None, device: int | None = None
) -> None:
    """Args: `device`: bytes on a device; None: what is estimated."""
    room = host_room(config)
    if room is None:
        return
    room -= lender_bytes or 0
    if _shares_host_memory(config, ir):
        device = popxl.plan.plan_of(ir).device if device is None else device
        room -= device * ir.instance_replication_factor
    spill(ir, room, ir.instance_replication_factor, lender_bytes)


def spill(ir: popxl.Ir, room: int, replicas: int, lender_bytes: int | None = None) -> None:
    """Put on disk what a process's state takes beyond so many bytes.

    Args:
        replicas: of the process.
        lender_bytes: as for `place`.
    """
    storage = popxl.plan.storage_of(ir)
    stored = (storage.remote - borrowed_bytes(ir, lender_bytes)) * replicas + PROCESS
    if stored + (WINDOWS if storage.disk else 0) > room:
        kinds = [kind for kind in KINDS if lender_bytes is None or kind != "weights"]
        _spill(ir, kinds, stored + WINDOWS - room, replicas)


def planned_bytes(use: popxl.plan.MemoryUse, replicas: int) -> int:
    """Bytes that a process with virtual devices takes.

    Args:
        replicas: of this process.
    """
    return PROCESS + (use.device + use.remote) * replicas + (WINDOWS if use.disk else 0)


def host_room(config: RunConfig) -> int | None:
    """Bytes of host memory for this process; None if not known."""
    given = config.execution.host_memory
    return host_memory() if given is None else round(given * 1e9)


def _instances() -> int:
    return int(popdist.getNumInstances())


def _spill(ir: popxl.Ir, kinds: Sequence[str], excess: int, replicas: int) -> None:
    """Put entries of so many more bytes on disk, or all that are worth it."""
    for kind in kinds:
        for buffer in ir.remote_buffers:
            nbytes = math.prod(buffer.tensor_shape) * buffer.tensor_dtype.itemsize * replicas
            movable = max(buffer.entries - buffer.resident - buffer.on_disk, 0)
            own = buffer.kind if buffer.kind in KINDS else ""
            if own == kind and excess > 0 and nbytes >= MIN_ENTRY * replicas:
                more = min(movable, math.ceil(excess / nbytes))
                buffer.on_disk += more
                excess -= more * nbytes
