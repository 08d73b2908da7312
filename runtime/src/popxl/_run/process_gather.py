"""Values that replicas of other processes hold, brought to all processes.

Everything here is collective: all processes call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from popxl._devices.mesh import replicated
from popxl._storage.replica_arrays import put_shards

_AXIS = "processes"


def replica_scalars(x: jax.Array) -> np.ndarray:
    """The number of every replica, of an array (replicas,)."""
    if x.is_fully_addressable:
        return np.asarray(x)
    replicated_array = _copier(replicated(x.sharding.mesh))(x)
    return np.asarray(replicated_array.addressable_data(0))


def gather_shards(
    local: Mapping[int, np.ndarray], needed: Sequence[int], mesh: Mesh
) -> Mapping[int, np.ndarray]:
    """What each of the `needed` replicas holds.

    Args:
        local: what the replicas of this process hold, all of one shape and dtype.
        mesh: of all replicas.
    """
    owners = [int(device.process_index) for device in mesh.devices.flat]
    if len(set(owners)) == 1:
        return local
    spec = next(iter(local.values()))
    positions = _positions_in_owner([owners[r] for r in needed])
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
    """The arrays of all processes of a mesh, (processes, *shape); all have the same shape, and a
    dtype that devices have."""
    across = _one_device_each(mesh)
    put_async = put_shards(
        lambda _: local[None], local[None], NamedSharding(across, PartitionSpec(_AXIS))
    )
    whole = NamedSharding(across, PartitionSpec(), memory_kind="device")
    return np.asarray(_copier(whole)(put_async).addressable_data(0))


def _positions_in_owner(owners: Sequence[int]) -> list[tuple[int, int]]:
    """Each part's owner, and its place among the owner's parts."""
    seen: dict[int, int] = {}
    positions = []
    for owner in owners:
        positions.append((owner, seen.setdefault(owner, 0)))
        seen[owner] += 1
    return positions


def _one_device_each(mesh: Mesh) -> Mesh:
    """The first device of each process, in the order of the processes."""
    first: dict[int, Any] = {}
    for device in mesh.devices.flat:
        first.setdefault(device.process_index, device)
    return Mesh(np.asarray([first[process] for process in sorted(first)]), (_AXIS,))


@cache
def _copier(sharding: NamedSharding) -> Any:
    """Copies arrays into a sharding."""
    return jax.jit(lambda x: x, out_shardings=sharding)
