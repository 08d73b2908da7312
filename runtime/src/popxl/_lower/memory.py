"""What a compiled program keeps in memory, by XLA's own account."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from popxl._lower.program import Program


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one replica's device, and in host memory for it, while the program runs.

    Attributes:
        variables: variables that live on the device.
        streams: host streams: all transfers of a run, in both directions.
        temporaries: what XLA allocates for intermediate values.
        remote: contents of remote buffers, in host memory.
    """

    variables: int
    streams: int
    temporaries: int
    remote: int

    @property
    def device(self) -> int:
        """Everything but the remote buffers."""
        return self.variables + self.streams + self.temporaries


def memory_use(program: Program, executable: Any) -> MemoryUse:
    """Memory of a program.

    XLA on CPU counts remote buffers as device memory, so state and streams are counted from their
    shapes; only temporaries come from XLA.
    """
    changing, fixed, constants, inputs, _, _ = program.argument_specs
    replicas = program.ir.replication_factor
    variables = _bytes([*changing.variables.values(), *fixed.variables.values()]) // replicas
    remote = _bytes([*changing.buffers.values(), *fixed.buffers.values()]) // replicas
    transfers = program.ir.num_host_transfers
    outputs = sum(transfers * math.prod(s.shape) * s.dtype.itemsize for s in program.d2h)
    return MemoryUse(
        variables=variables + _bytes(constants),
        streams=_bytes(inputs.values()) // replicas + outputs,
        temporaries=executable.memory_analysis().temp_size_in_bytes,
        remote=remote,
    )


def _bytes(specs: Any) -> int:
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in specs)
