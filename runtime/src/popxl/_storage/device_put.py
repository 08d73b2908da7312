"""Batched copies between host and device memory (`jax.device_put`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import jax
import numpy as np

from popxl._devices.mesh import create_per_replica_sharding
from popxl._storage.replica_arrays import put_array

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding


def device_put_interleaved(
    arrays: Sequence[jax.Array], shardings: Sequence[NamedSharding]
) -> list[jax.Array]:
    """Copies arrays in one direction, with small spacer copies that alternate XLA's GPU streams.

    It puts copies on four streams in turn, so that loads would wait for the stores before them.
    A copy of one number after each load, and before each store, is a spacer: loads have every other
    stream, and stores the rest.
    """
    mesh, leaves = shardings[0].mesh, shardings[0].memory_kind != "device"
    spacer = _spacer_array(mesh), create_per_replica_sharding(mesh)
    pairs = [
        pair
        for copies in zip(arrays, shardings, strict=True)
        for pair in ((spacer, copies) if leaves else (copies, spacer))
    ]
    return device_put_batch([array for array, _ in pairs], [s for _, s in pairs])[leaves::2]


@lru_cache(1)
def _spacer_array(mesh: Mesh) -> jax.Array:
    return put_array(
        np.zeros(mesh.devices.size, np.int32), create_per_replica_sharding(mesh, "pinned_host")
    )


def device_put_batch(
    arrays: Sequence[jax.Array], shardings: Sequence[NamedSharding]
) -> list[jax.Array]:
    """Copies arrays between host and device memory in one transfer.

    Of arrays that several processes share, each moves what it has: JAX would compile a program for
    each transfer of a global array.
    """
    if all(array.is_fully_addressable for array in arrays):
        return jax.device_put(list(arrays), list(shardings))
    parts = [shard for array in arrays for shard in array.addressable_shards]
    kinds = [sharding.memory_kind for array, sharding in zip(arrays, shardings, strict=True)
             for _ in array.addressable_shards]  # fmt: skip
    single = [
        jax.sharding.SingleDeviceSharding(shard.device, memory_kind=kind)
        for shard, kind in zip(parts, kinds, strict=True)
    ]
    copies = iter(jax.device_put([shard.data for shard in parts], single))
    return [
        jax.make_array_from_single_device_arrays(
            array.shape, sharding, [next(copies) for _ in array.addressable_shards]
        )
        for array, sharding in zip(arrays, shardings, strict=True)
    ]
