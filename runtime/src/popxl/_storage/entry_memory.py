"""Memory for disk I/O of remote-buffer entries: byte views to write from, memory to read into."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from popxl._devices.cpu import memory_view

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from popxl._devices.cpu import BufferPool
    from popxl._storage.scratch_files import ScratchFolder

Allocation = tuple[list[np.ndarray], Callable[[], jax.Array]]


class EntryMemory:
    """Memory layout of this process's shards of a remote buffer's entries.

    Args:
        shape: of an entry's array.
        rows: of its first axis that each replica has.
        dtype: JAX's.
        sharding: of the array.

    Attributes:
        sizes: bytes of what each of this process's replicas has.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        rows: int,
        dtype: Any,
        sharding: NamedSharding,
        scratch: ScratchFolder,
        buffer_pool: BufferPool,
    ) -> None:
        self._global_shape, self._part = shape, (rows, *shape[1:])
        self._rows_per_replica, self._dtype, self._sharding = max(rows, 1), dtype, sharding
        self._scratch, self._buffer_pool = scratch, buffer_pool
        slices = sharding.addressable_devices_indices_map(shape)
        at = {
            self._replica_of_index(index): device
            for device, index in slices.items()
            if index is not None
        }
        self._replicas = sorted(at)
        self._devices = [at[replica] for replica in self._replicas]
        self._is_shared = sharding.memory_kind == "device"  # by host and device
        nbytes = math.prod(self._part) * np.dtype(dtype).itemsize
        self.sizes = [nbytes] * len(self._devices)

    def _replica_of_index(self, index: tuple[slice, ...]) -> int:
        return (index[0].start or 0) // self._rows_per_replica

    def _local_shards(self, array: jax.Array) -> list[jax.Array]:
        of = {self._replica_of_index(s.index): s.data for s in array.addressable_shards}
        return [of[replica] for replica in sorted(of)]

    def byte_views(self, array: jax.Array) -> list[np.ndarray]:
        """Returns each local replica's shard of a remote-buffer entry as bytes (uint8).

        On CPUs the array must outlive them.
        """
        shards = self._local_shards(array)
        if self._is_shared:  # NumPy's views would make XLA copy what is donated later
            return [memory_view(shard) for shard in shards]
        return [np.asarray(shard).reshape(-1).view(np.uint8) for shard in shards]

    def allocate(self, donates: bool) -> Allocation:
        """Returns memory for each local shard of an entry, and a function that makes their array.

        Args:
            donates: the array may be donated. On CPUs it lies in memory of XLA's own then: a
                program copies what it is donated in other memory. Any other array lies in memory
                that comes back to the folder's, which XLA adopts.
        """
        if donates and self._is_shared:
            return self._allocate_device_memory()
        take = self._scratch.blocks.take
        views = [take(size)[:size] for size in self.sizes]
        of = dict(zip(self._replicas, views, strict=True))

        def shard_view(index: tuple[slice, ...]) -> np.ndarray:
            return of[self._replica_of_index(index)].view(self._dtype).reshape(self._part)

        return views, lambda: jax.make_array_from_callback(
            self._global_shape, self._sharding, shard_view
        )

    def _allocate_device_memory(self) -> Allocation:
        take = self._buffer_pool.take
        parts = [take(self._part, self._dtype, device) for device in self._devices]
        views = [memory_view(part) for part in parts]
        global_shape, sharding = self._global_shape, self._sharding
        return views, lambda: jax.make_array_from_single_device_arrays(
            global_shape, sharding, parts
        )

    def release(self, array: jax.Array) -> None:
        """Returns the memory of an entry's array, which only the caller still uses, to the pool."""
        if self._is_shared:
            for part in self._local_shards(array):
                self._buffer_pool.put_back(part)
