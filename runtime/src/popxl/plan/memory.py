"""Memory that is there and that is taken: of devices, and by compiled programs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from popxl._lower.devices import replica_mesh
from popxl.plan.records import MemoryUse

if TYPE_CHECKING:
    from popxl._lower.program import Program


def device_memory(device_desc: str, replicas: int) -> int | None:
    """Bytes that a program may use on each of `replicas` devices; None if that is host memory.

    Args:
        device_desc: as for `popxl.Session`.

    Raises:
        DeviceError: there are fewer devices.
    """
    devices = replica_mesh(device_desc, replicas).devices.flat
    if devices[0].platform == "cpu":
        return None
    found = [(d.memory_stats() or {}).get("bytes_limit") for d in devices]
    return min((limit for limit in found if limit), default=None)


def memory_use(program: Program, executable: Any) -> MemoryUse:
    """What a compiled program keeps in memory, by XLA's own account.

    XLA on CPU counts remote buffers as device memory, so state and streams are counted from the
    shapes of what it takes and gives; only temporaries come from XLA.
    """
    changing, fixed, constants, inputs, _, _ = program.argument_specs
    replicas = program.ir.replication_factor
    variables = _bytes([*changing.variables.values(), *fixed.variables.values()]) // replicas
    remote = _bytes([*changing.buffers.values(), *fixed.buffers.values()]) // replicas
    outputs = program.ir.num_host_transfers * _bytes(program.d2h)
    return MemoryUse(
        variables=variables + _bytes(constants),
        streams=_bytes(inputs.values()) // replicas + outputs,
        temporaries=executable.memory_analysis().temp_size_in_bytes,
        remote=remote,
    )


def _bytes(specs: Iterable[Any]) -> int:
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in specs)
