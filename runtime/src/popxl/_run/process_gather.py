"""All-gather across processes of the values that each process's replicas hold.

Everything here is collective: all processes call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from popxl._devices.mesh import create_replicated_sharding
from popxl._storage.replica_arrays import put_shards

_AXIS = "processes"


def replica_scalars(x: jax.Array) -> np.ndarray:
    """Returns each replica's value of a scalar as an array (replicas,), on every process."""
    if x.is_fully_addressable:
        return np.asarray(x)
    replicated_array = _compile_copy(create_replicated_sharding(x.sharding.mesh))(x)
    return np.asarray(replicated_array.addressable_data(0))


def gather_shards(
    local: Mapping[int, np.ndarray], needed: Sequence[int], mesh: Mesh
) -> Mapping[int, np.ndarray]:
    """Returns a variable's shards of the `needed` replicas, gathered from all processes.

    Args:
        local: shards of this process's replicas, of one shape and dtype.
        mesh: of all replicas.
    """
    owners = [int(device.process_index) for device in mesh.devices.flat]
    if len(set(owners)) == 1:
        return local
    spec = next(iter(local.values()))
    positions = _owners_and_indices([owners[r] for r in needed])
    local_shards = {
        position: local[r] for position, r in zip(positions, needed, strict=True) if r in local
    }
    width = 1 + max(position for _, position in positions)
    filled = np.zeros((width, *spec.shape), spec.dtype)
    for (_, position), part in local_shards.items():
        filled[position] = part
    received = all_gather_processes(filled, mesh)
    order = {process: i for i, process in enumerate(sorted(set(owners)))}
    return {
        r: received[order[process], position]
        for (process, position), r in zip(positions, needed, strict=True)
    }


def all_gather_processes(local: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Gathers one array per process: `shape` on each → (processes, *shape) on all."""
    across = _mesh_of_first_devices(mesh)
    put_async = put_shards(
        lambda _: local[None], local[None], NamedSharding(across, PartitionSpec(_AXIS))
    )
    replicated_sharding = NamedSharding(across, PartitionSpec(), memory_kind="device")
    return np.asarray(_compile_copy(replicated_sharding)(put_async).addressable_data(0))


def _owners_and_indices(owners: Sequence[int]) -> list[tuple[int, int]]:
    """Returns, for each shard, its process and its index among that process's shards."""
    counts: dict[int, int] = {}
    positions = []
    for owner in owners:
        positions.append((owner, counts.setdefault(owner, 0)))
        counts[owner] += 1
    return positions


def _mesh_of_first_devices(mesh: Mesh) -> Mesh:
    """Returns a mesh of the first device of each process, in process order."""
    first: dict[int, Any] = {}
    for device in mesh.devices.flat:
        first.setdefault(device.process_index, device)
    return Mesh(np.asarray([first[process] for process in sorted(first)]), (_AXIS,))


@cache
def _compile_copy(sharding: NamedSharding) -> Any:
    """Returns a compiled function that copies an array into a sharding."""
    return jax.jit(lambda x: x, out_shardings=sharding)
