"""Remote buffers while a session is attached: one array for each entry.

An entry lives in the host's memory, or stays in the device's if its buffer says so (`resident`), or
lies in a file (`on_disk`). On CPU the first two are the same, and a load is no copy. An entry that
nothing was stored to is zeros, which are made when it is first loaded. An entry may also be that of
another program, which lends it (`borrow`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import jax
import numpy as np

from popxl._devices.mesh import copied, global_shape, per_replica
from popxl._schedule.schedule import Load, Store
from popxl._storage.disk_queue import EntryFile, Traffic
from popxl._storage.entry_memory import EntryMemory
from popxl._storage.replica_arrays import put, put_variable

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding

    from popxl._schedule.schedule import Index
    from popxl.remote_buffer import RemoteBuffer
    from popxl.tensor import Variable

_FIRST = 4096  # bytes that tell nearly all values from zeros


class Entries:
    """The entries of one buffer, each an array of all replicas' parts (see `global_shape`).

    Attributes:
        stored: the entries that the program has stored to since `stored` was last cleared.
    """

    def __init__(
        self,
        buffer: RemoteBuffer,
        mesh: Mesh,
        memory: str = "device",
        traffic: Traffic | None = None,
    ) -> None:
        """
        Args:
            memory: JAX's kind of the host's; see `popxl._compile.platforms`.
            traffic: of the folder for entries on disk, which must be there if there are.
        """
        self.buffer, self.stored = buffer, set[int]()
        self._resident = buffer.resident_entries
        self._device = per_replica(mesh)
        self._host = per_replica(mesh, memory)
        self._moves = self._host != self._device
        self._shape = global_shape(mesh.devices.size, buffer.tensor_shape)
        self._rows = self._shape[0] // mesh.devices.size
        self._arrays: dict[int, jax.Array] = {}
        self._borrowed: dict[int, tuple[Entries, int]] = {}
        self._filed = {index: place for place, index in enumerate(buffer.on_disk_entries)}
        self._traffic, self._file = traffic, self._made_file(traffic)

    def _made_file(self, traffic: Traffic | None) -> EntryFile | None:
        if traffic is None or not self._filed:
            return None
        dtype = self.buffer.tensor_dtype.as_jax()
        memory = EntryMemory(
            self._shape, self._rows, dtype, self._host, traffic.scratch, traffic.recycled
        )
        file = EntryFile(traffic, len(self._filed), memory)
        self._closed = weakref.finalize(self, file.close)
        return file

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.traffic.settle()
            self._closed()

    def __len__(self) -> int:
        return self.buffer.entries

    @property
    def nbytes(self) -> int:
        """Bytes of what this process holds of them."""
        shards = (s for array in self._arrays.values() for s in array.addressable_shards)
        return sum(shard.data.nbytes for shard in shards)

    def _sharding(self, index: int) -> NamedSharding:
        return self._device if index in self._resident else self._host

    # ---- from the schedule ----------------------------------------------------------------------
    def travels(self, index: Index) -> bool:
        """Whether a load takes device memory of its own: not if the entry is there already."""
        if isinstance(index, tuple):
            return True
        return self._moves and index not in self._resident

    def load(self, index: Index, donate: bool = False, copies: bool = False) -> jax.Array:
        """The entry on the device.

        Args:
            donate: the entry is left without a value, and the result may be donated.
            copies: the result shares no memory with the entry.
        """
        self._note(Load, index)
        if isinstance(index, tuple):
            return self._load_each(index)
        array = self._arrays.get(index)
        if array is None:
            array, own = self._brought(index, donate)
            return self._moved(array, self._device, (copies or donate) and not own)
        if donate:
            del self._arrays[index]
        return self._moved(array, self._device, copies)

    def _brought(self, index: int, donate: bool) -> tuple[jax.Array, bool]:
        """An entry that is not in memory, and whether nobody else has this array."""
        self._check(index)
        place = None if index in self._borrowed else self.in_file(index)
        if place is None:
            array = self.array(index)  # of another program, or zeros
            if donate:
                self._arrays.pop(index, None)
            return array, donate and index not in self._borrowed
        file, at = place
        return file.load(at, donate) or (self._zeros(index), True)

    def store(self, index: Index, value: jax.Array, copies: bool = False) -> None:
        """Replace the entry.

        Args:
            copies: the entry shares no memory with `value`.
        """
        if isinstance(index, tuple):
            self._store_each(index, value)
        else:
            self._check(index)
            self._set(index, self._moved(value, self._sharding(index), copies))
        self._note(Store, index)

    def _note(self, kind: type[Load | Store], index: Index) -> None:
        if self._traffic is not None:
            self._traffic.done(kind, self.buffer, index)

    def _set(self, index: int, array: jax.Array) -> None:
        self._borrowed.pop(index, None)
        if self._file is not None and index in self._filed:
            self._file.store(self._filed[index], array)
        else:
            self._arrays[index] = array
        self.stored.add(index)

    def departing(self, index: int, donate: bool) -> tuple[jax.Array, NamedSharding]:
        """The entry where it is stored, and the device's sharding; see `load`."""
        self._note(Load, index)
        array = self.array(index)
        if donate:
            self._arrays.pop(index, None)  # one of a file, or of another program, is not there
        return array, self._device

    def arriving(self, index: int) -> NamedSharding:
        """The sharding in which the entry is stored."""
        self._check(index)
        return self._sharding(index)

    def arrived(self, index: int, array: jax.Array) -> None:
        """Let an array, which is where the entry is stored, be the entry."""
        self._set(index, array)
        self._note(Store, index)

    def _moved(self, array: jax.Array, to: NamedSharding, copies: bool) -> jax.Array:
        """The array in other memory; in memory of its own, if `copies`."""
        if self._moves and array.sharding.memory_kind != to.memory_kind:
            return jax.device_put(array, to)
        return copied(array) if copies else array

    def _check(self, index: int) -> None:
        if not 0 <= index < self.buffer.entries:
            raise IndexError(
                f"the program uses entry {index} of {self.buffer!r}, which has {len(self)} entries"
            )

    # ---- entries that differ between replicas ---------------------------------------------------
    def _load_each(self, indices: Sequence[int]) -> jax.Array:
        whole = {i: jax.device_put(self.array(i), self._device) for i in set(indices)}
        if 0 in self._shape:
            return copied(whole[indices[0]])
        shards = {i: self._shards(array) for i, array in whole.items()}
        parts = [shards[i][r] for r, i in enumerate(indices) if r in shards[i]]
        made = jax.make_array_from_single_device_arrays(self._shape, self._device, parts)
        return copied(made)

    def _store_each(self, indices: Sequence[int], value: jax.Array) -> None:
        for index in set(indices):
            self._check(index)
        if 0 in self._shape:
            return
        new = self._shards(value)
        for index in set(indices):
            old = self._shards(jax.device_put(self.array(index), self._device))
            parts = [new[r] if indices[r] == index else old[r] for r in sorted(old)]
            made = jax.make_array_from_single_device_arrays(self._shape, self._device, parts)
            self._set(index, jax.device_put(copied(made), self._sharding(index)))

    # ---- from the session -----------------------------------------------------------------------
    def array(self, index: int) -> jax.Array:
        """The entry where it is stored; one of a file in memory."""
        self._check(index)
        if index in self._borrowed:
            lender, theirs = self._borrowed[index]
            return lender.array(theirs)
        if self.in_file(index) is not None:
            return self._brought(index, donate=False)[0]
        if index not in self._arrays:
            self._arrays[index] = self._zeros(index)
        return self._arrays[index]

    def _zeros(self, index: int) -> jax.Array:
        dtype, sharding = self.buffer.tensor_dtype.as_jax(), self._sharding(index)
        # Made by XLA's threads, while the walker goes on; of no elements it would not be cut.
        if not self._moves and 0 not in self._shape:
            return jax.numpy.zeros(self._shape, dtype, device=sharding)
        return put(np.broadcast_to(np.zeros((), dtype), self._shape), sharding)

    def put(self, index: int, var: Variable, value: np.ndarray) -> None:
        """Fill an entry with a variable's value. Zeros are not written to a file."""
        self._check(index)
        if self._file is not None and index in self._filed and _is_zeros(value):
            self._borrowed.pop(index, None)
            self._file.forget(self._filed[index])
            return
        shape, sharding = self.buffer.tensor_shape, self._sharding(index)
        self._set(index, put_variable(var, value, shape, sharding))
        self.stored.discard(index)

    def borrow(self, index: int, lender: Entries, theirs: int) -> bool:
        """Let an entry be that of another program, if they are alike. Storing to it ends that."""
        own, other = self.buffer, lender.buffer
        alike = own.tensor_shape == other.tensor_shape and own.tensor_dtype == other.tensor_dtype
        if not (alike and self._host == lender._host):
            return False
        self._arrays.pop(index, None)
        self._borrowed[index] = lender, theirs
        return True

    # ---- files ----------------------------------------------------------------------------------
    @property
    def may_be_filed(self) -> bool:
        """Whether some are in a file, or another program's, which may have one."""
        return self._file is not None or bool(self._borrowed)

    def in_file(self, index: int) -> tuple[EntryFile, int] | None:
        """The file that has an entry, and the entry's place there; None if none has."""
        if index in self._borrowed:
            lender, theirs = self._borrowed[index]
            return lender.in_file(theirs)
        if self._file is None or index not in self._filed:
            return None
        return self._file, self._filed[index]

    def _shards(self, array: jax.Array) -> dict[int, jax.Array]:
        """This process's part of an array, by replica."""
        return {(s.index[0].start or 0) // self._rows: s.data for s in array.addressable_shards}


def _is_zeros(value: np.ndarray) -> bool:
    """Whether all bits are zero."""
    content = np.asarray(value, order="C").reshape(-1).view(np.uint8)
    end = content.size - content.size % 8
    if content[:_FIRST].any() or content[end:].any():
        return False
    return not content[:end].view(np.uint64).any()


def put_apart(arrays: Sequence[jax.Array], to: Sequence[NamedSharding]) -> list[jax.Array]:
    """Like `put_together`, of arrays that all go one way, for XLA's GPU client.

    It puts copies on four streams in turn, so that loads would wait for the stores before them.
    A copy of one number after each load, and before each store, is a spacer: loads have every other
    stream, and stores the rest.
    """
    mesh, leaves = to[0].mesh, to[0].memory_kind != "device"
    spacer = _spacer(mesh), per_replica(mesh)
    pairs = [
        pair
        for moved in zip(arrays, to, strict=True)
        for pair in ((spacer, moved) if leaves else (moved, spacer))
    ]
    return put_together([array for array, _ in pairs], [s for _, s in pairs])[leaves::2]


@lru_cache(1)
def _spacer(mesh: Mesh) -> jax.Array:
    return put(np.zeros(mesh.devices.size, np.int32), per_replica(mesh, "pinned_host"))


def put_together(arrays: Sequence[jax.Array], to: Sequence[NamedSharding]) -> list[jax.Array]:
    """Move arrays between memories of the devices that they are on, all in one transfer.

    Of arrays that several processes share, each moves what it has: JAX would compile a program for
    each transfer of a whole one.
    """
    if all(array.is_fully_addressable for array in arrays):
        return jax.device_put(list(arrays), list(to))
    parts = [shard for array in arrays for shard in array.addressable_shards]
    kinds = [sharding.memory_kind for array, sharding in zip(arrays, to, strict=True)
             for _ in array.addressable_shards]  # fmt: skip
    single = [
        jax.sharding.SingleDeviceSharding(shard.device, memory_kind=kind)
        for shard, kind in zip(parts, kinds, strict=True)
    ]
    moved = iter(jax.device_put([shard.data for shard in parts], single))
    return [
        jax.make_array_from_single_device_arrays(
            array.shape, sharding, [next(moved) for _ in array.addressable_shards]
        )
        for array, sharding in zip(arrays, to, strict=True)
    ]
