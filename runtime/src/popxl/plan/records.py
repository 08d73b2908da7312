"""Records of a plan: costs of labelled regions, kernels, collectives and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from popxl.plan.storage import Storage


@dataclass(frozen=True, order=True)
class Collective:
    """Collectives of one kind over groups of one size: their number and total bytes.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter" or another tag of the op.
        group_size: replicas of a group.
        consecutive: true if the replicas of a group are neighbours, which share fast links first.
        count: number of collectives of one replica.
        nbytes: bytes of the full value (of the group's shards together), summed over `count`.
    """

    kind: str
    group_size: int
    consecutive: bool
    count: int
    nbytes: int

    @property
    def sent(self) -> int:
        """Bytes that each replica sends when the group forms a ring.

        A gather or scatter sends all but one of the shards once, a reduction does both (Patarasuk
        and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
        """
        shards = self.nbytes * (self.group_size - 1) // self.group_size
        return 2 * shards if self.kind == "all_reduce" else shards


class Kernel(NamedTuple):
    """Work of one GPU or CPU kernel: FLOPs and bytes.

    Attributes:
        nbytes: bytes read from and written to device memory.
        flops: FLOPs of matrix products.
        float8: true if their operands are float8.
        attention: head dimension of fused attention; 0: another kernel.
        backward: true for attention's backward pass.
        added: bytes of `nbytes` for an accumulator that a product adds to, read and written.
    """

    nbytes: int
    flops: int = 0
    float8: bool = False
    attention: int = 0
    backward: bool = False
    added: int = 0


@dataclass(frozen=True)
class RegionCost:
    """Cost of a labelled region (`popxl.plan.part`) on one replica in one run.

    Attributes:
        name: the label; "" for ops without one.
        flops: operations of matrix products and convolutions, 2 for each multiply-add.
        float8_flops: those among them whose operands are float8.
        arithmetic: other arithmetic operations, one for each element.
        device_traffic: bytes that kernels read from and write to device memory.
        host_to_device, device_to_host: bytes of remote loads and stores and of host streams.
        disk_read, disk_written: bytes of remote loads and stores of entries on disk, cached ones
            included.
        collectives: by kind and group.
        ops: number of executions by op.
        device_bytes: peak bytes of intermediate values that are live while the region runs, those
            of other regions included.
    """

    name: str
    flops: int = 0
    arithmetic: int = 0
    device_traffic: int = 0
    host_to_device: int = 0
    device_to_host: int = 0
    collectives: tuple[Collective, ...] = ()
    ops: Mapping[str, int] = field(default_factory=dict)
    device_bytes: int = 0
    float8_flops: int = 0
    disk_read: int = 0
    disk_written: int = 0

    @property
    def code_loads(self) -> int:
        """Executions of `ops.remote_code_load` and `ops.code_copy`, hints that XLA ignores."""
        return self.ops.get("code_copy", 0)


@dataclass(frozen=True, kw_only=True)
class MemoryUse(Storage):
    """Memory of a running program, in bytes of one replica.

    Attributes:
        temporaries: peak device bytes of intermediate values.
    """

    temporaries: int

    @property
    def device_bytes(self) -> int:
        """Device bytes of a replica: variables, streams and temporaries."""
        return self.variables + self.streams + self.temporaries


@dataclass(frozen=True, kw_only=True)
class Plan(MemoryUse):
    """Plan of a program: memory and work of a run on one replica.

    Attributes:
        replicas: devices that run the program.
        parts: costs of the regions, in order of first execution.
    """

    replicas: int
    parts: tuple[RegionCost, ...]

    @property
    def host_bytes(self) -> int:
        """Host bytes of the remote buffers of all replicas."""
        return self.remote * self.replicas

    @property
    def flops(self) -> int:
        """FLOPs of matmuls and convolutions in a run, on one replica."""
        return sum(part.flops for part in self.parts)

    @property
    def arithmetic(self) -> int:
        """Arithmetic operations outside matmuls and convolutions in a run, on one replica."""
        return sum(part.arithmetic for part in self.parts)
