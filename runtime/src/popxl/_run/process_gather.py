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
from popxl._storage.replica_arrays import put_parts

_AXIS = "processes"


def numbers(x: jax.Array) -> np.ndarray:
    """The number of every replica, of an array (replicas,)."""
    if x.is_fully_addressable:
        return np.asarray(x)
    everywhere = _copier(replicated(x.sharding.mesh))(x)
    return np.asarray(everywhere.addressable_data(0))


def parts_everywhere(
    own: Mapping[int, np.ndarray], needed: Sequence[int], mesh: Mesh
) -> Mapping[int, np.ndarray]:
    """What each of the `needed` replicas holds.

    Args:
        own: what the replicas of this process hold, all of one shape and dtype.
        mesh: of all replicas.
    """
    owners = [int(device.process_index) for device in mesh.devices.flat]
    if len(set(owners)) == 1:
        return own
    spec = next(iter(own.values()))
    slots = _slots([owners[r] for r in needed])
    mine = {slot: own[r] for slot, r in zip(slots, needed, strict=True) if r in own}
    width = 1 + max(slot for _, slot in slots)
    filled = np.zeros((width, *spec.shape), spec.dtype)
    for (_, slot), part in mine.items():
        filled[slot] = part
    received = of_all_processes(filled, mesh)
    order = {process: i for i, process in enumerate(sorted(set(owners)))}
    return {
        r: received[order[process], slot] for (process, slot), r in zip(slots, needed, strict=True)
    }


def of_all_processes(own: np.ndarray, mesh: Mesh) -> np.ndarray:
    """The arrays of all processes of a mesh, (processes, *shape); all have the same shape, and a
    dtype that devices have."""
    across = _one_device_each(mesh)
    sent = put_parts(lambda _: own[None], own[None], NamedSharding(across, PartitionSpec(_AXIS)))
    whole = NamedSharding(across, PartitionSpec(), memory_kind="device")
    return np.asarray(_copier(whole)(sent).addressable_data(0))


def _slots(owners: Sequence[int]) -> list[tuple[int, int]]:
    """Each part's owner, and its place among the owner's parts."""
    seen: dict[int, int] = {}
    slots = []
    for owner in owners:
        slots.append((owner, seen.setdefault(owner, 0)))
        seen[owner] += 1
    return slots


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
