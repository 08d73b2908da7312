"""Storage of a remote buffer in a session: one array for each entry.

An entry is in host memory, on the device (`resident`) or in a file (`on_disk`). On CPUs host and
device memory are the same, and a load copies nothing. An entry that was never stored to is zeros,
created at its first load. An entry can also be shared with another session (`share_entry`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from popxl._devices.mesh import copy_array, create_per_replica_sharding, global_shape
from popxl._schedule.schedule import Load, Store
from popxl._storage.replica_arrays import put_array, put_variable

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding

    from popxl._schedule.schedule import Index
    from popxl._storage.disk_queue import DiskQueue, EntryFile
    from popxl.remote_buffer import RemoteBuffer
    from popxl.tensor import Variable

_FIRST = 4096  # bytes that tell nearly all values from zeros


class BufferStorage:
    """The entries of one remote buffer, each a global array over all replicas (see `global_shape`).

    Attributes:
        stored: indices of the entries that the program has stored to since it was cleared.
    """

    def __init__(
        self,
        buffer: RemoteBuffer,
        mesh: Mesh,
        memory: str = "device",
        disk_queue: DiskQueue | None = None,
    ) -> None:
        """Creates storage whose entries are all zeros.

        Args:
            memory: JAX's kind of the host's; see `popxl._compile.platforms`.
            disk_queue: of the folder for entries on disk, which must be there if there are.
        """
        self.buffer, self.stored = buffer, set[int]()
        self._resident = buffer.resident_entries
        self._device = create_per_replica_sharding(mesh)
        self._host = create_per_replica_sharding(mesh, memory)
        self._needs_transfer = self._host != self._device
        self._shape = global_shape(mesh.devices.size, buffer.tensor_shape)
        self._rows_per_replica = self._shape[0] // mesh.devices.size
        self._arrays: dict[int, jax.Array] = {}
        self._shared_entries: dict[int, tuple[BufferStorage, int]] = {}
        self._disk_indices = {
            index: position for position, index in enumerate(buffer.on_disk_entries)
        }
        self._disk_queue, self._file = disk_queue, self._create_file(disk_queue)

    def _create_file(self, disk_queue: DiskQueue | None) -> EntryFile | None:
        if disk_queue is None or not self._disk_indices:
            return None
        from popxl._storage.disk_queue import EntryFile

        dtype = self.buffer.tensor_dtype.as_jax()
        from popxl._storage.entry_memory import EntryMemory

        memory = EntryMemory(
            self._shape,
            self._rows_per_replica,
            dtype,
            self._host,
            disk_queue.scratch,
            disk_queue.buffer_pool,
        )
        file = EntryFile(disk_queue, len(self._disk_indices), memory)
        self._closed = weakref.finalize(self, file.close)
        return file

    def renamed(self, buffer: RemoteBuffer) -> BufferStorage:
        """Returns these entries as the storage of an equal remote buffer of another program."""
        view = copy.copy(self)
        view.buffer = buffer
        return view

    def drop_entries(self) -> None:
        """Drops the remote-buffer entries in this process's memory."""
        self._arrays.clear()

    def close(self) -> None:
        """Removes the scratch file of the remote-buffer entries that are on disk."""
        if self._file is not None:
            self._file.disk_queue.wait_all()
            self._closed()

    def __len__(self) -> int:
        return self.buffer.entries

    @property
    def nbytes(self) -> int:
        """Bytes of the remote-buffer entries in this process's memory."""
        shards = (s for array in self._arrays.values() for s in array.addressable_shards)
        return sum(shard.data.nbytes for shard in shards)

    def _entry_sharding(self, index: int) -> NamedSharding:
        return self._device if index in self._resident else self._host

    # ---- from the schedule ----------------------------------------------------------------------
    def needs_transfer(self, index: Index) -> bool:
        """True if a load copies the remote-buffer entry; False if it is on the device already."""
        if isinstance(index, tuple):
            return True
        return self._needs_transfer and index not in self._resident

    def load(self, index: Index, donate: bool = False, copies: bool = False) -> jax.Array:
        """Returns the array of a remote-buffer entry in device memory.

        Args:
            donate: the entry is left without a value, and the result may be donated.
            copies: the result shares no memory with the entry.
        """
        self._advance_disk_queue(Load, index)
        if isinstance(index, tuple):
            return self._load_per_replica(index)
        array = self._arrays.get(index)
        if array is None:
            array, own = self._read_entry(index, donate)
            return self._move_to_memory(array, self._device, (copies or donate) and not own)
        if donate:
            del self._arrays[index]
        return self._move_to_memory(array, self._device, copies)

    def _read_entry(self, index: int, donate: bool) -> tuple[jax.Array, bool]:
        """Reads a buffer entry that is not in memory; True if nothing else uses the array."""
        self._check_index(index)
        position = None if index in self._shared_entries else self.disk_slot(index)
        if position is None:
            array = self.array(index)  # of another program, or zeros
            if donate:
                self._arrays.pop(index, None)
            return array, donate and index not in self._shared_entries
        file, at = position
        return file.load(at, donate) or (self._zero_entry(index), True)

    def store(self, index: Index, value: jax.Array, copies: bool = False) -> None:
        """Replaces the array of a remote-buffer entry.

        Args:
            copies: the entry shares no memory with `value`.
        """
        if isinstance(index, tuple):
            self._store_per_replica(index, value)
        else:
            self._check_index(index)
            self._set_entry(index, self._move_to_memory(value, self._entry_sharding(index), copies))
        self._advance_disk_queue(Store, index)

    def _advance_disk_queue(self, kind: type[Load | Store], index: Index) -> None:
        if self._disk_queue is not None:
            self._disk_queue.advance(kind, self.buffer, index)

    def _set_entry(self, index: int, array: jax.Array) -> None:
        self._shared_entries.pop(index, None)
        if self._file is not None and index in self._disk_indices:
            self._file.store(self._disk_indices[index], array)
        else:
            self._arrays[index] = array
        self.stored.add(index)

    def load_source_and_sharding(self, index: int, donate: bool) -> tuple[jax.Array, NamedSharding]:
        """Returns a remote-buffer entry's stored array, and the device sharding to copy it to."""
        self._advance_disk_queue(Load, index)
        array = self.array(index)
        if donate:
            self._arrays.pop(index, None)  # one of a file, or of another program, is not there
        return array, self._device

    def store_sharding(self, index: int) -> NamedSharding:
        """Returns the sharding (and memory kind) in which a remote-buffer entry is stored."""
        self._check_index(index)
        return self._entry_sharding(index)

    def commit_store(self, index: int, array: jax.Array) -> None:
        """Makes an array that already has sharding `store_sharding` the value of a stored entry."""
        self._set_entry(index, array)
        self._advance_disk_queue(Store, index)

    def _move_to_memory(
        self, array: jax.Array, target_sharding: NamedSharding, copies: bool
    ) -> jax.Array:
        """Copies a buffer entry to a sharding's memory kind, if it differs or if `copies`."""
        if self._needs_transfer and array.sharding.memory_kind != target_sharding.memory_kind:
            return jax.device_put(array, target_sharding)
        return copy_array(array) if copies else array

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.buffer.entries:
            raise IndexError(
                f"the program uses entry {index} of {self.buffer!r}, which has {len(self)} entries"
            )

    # ---- entries that differ between replicas ---------------------------------------------------
    def _load_per_replica(self, indices: Sequence[int]) -> jax.Array:
        whole = {i: jax.device_put(self.array(i), self._device) for i in set(indices)}
        if 0 in self._shape:
            return copy_array(whole[indices[0]])
        shards = {i: self._shards_by_replica(array) for i, array in whole.items()}
        parts = [shards[i][r] for r, i in enumerate(indices) if r in shards[i]]
        made = jax.make_array_from_single_device_arrays(self._shape, self._device, parts)
        return copy_array(made)

    def _store_per_replica(self, indices: Sequence[int], value: jax.Array) -> None:
        for index in set(indices):
            self._check_index(index)
        if 0 in self._shape:
            return
        new = self._shards_by_replica(value)
        for index in set(indices):
            old = self._shards_by_replica(jax.device_put(self.array(index), self._device))
            parts = [new[r] if indices[r] == index else old[r] for r in sorted(old)]
            made = jax.make_array_from_single_device_arrays(self._shape, self._device, parts)
            self._set_entry(index, jax.device_put(copy_array(made), self._entry_sharding(index)))

    # ---- from the session -----------------------------------------------------------------------
    def array(self, index: int) -> jax.Array:
        """Returns a remote-buffer entry's stored array; an entry on disk is read into memory."""
        self._check_index(index)
        if index in self._shared_entries:
            source, source_index = self._shared_entries[index]
            return source.array(source_index)
        if self.disk_slot(index) is not None:
            return self._read_entry(index, donate=False)[0]
        if index not in self._arrays:
            self._arrays[index] = self._zero_entry(index)
        return self._arrays[index]

    def _zero_entry(self, index: int) -> jax.Array:
        dtype, sharding = self.buffer.tensor_dtype.as_jax(), self._entry_sharding(index)
        # XLA's threads create it while the executor continues; JAX cannot shard an empty array.
        if not self._needs_transfer and 0 not in self._shape:
            return jax.numpy.zeros(self._shape, dtype, device=sharding)
        return put_array(np.broadcast_to(np.zeros((), dtype), self._shape), sharding)

    def put_value(self, index: int, var: Variable, value: np.ndarray) -> None:
        """Sets a remote-buffer entry to a variable's value; zeros are not written to disk."""
        self._check_index(index)
        if self._file is not None and index in self._disk_indices and _is_zeros(value):
            self._shared_entries.pop(index, None)
            self._file.discard(self._disk_indices[index])
            return
        shape, sharding = self.buffer.tensor_shape, self._entry_sharding(index)
        self._set_entry(index, put_variable(var, value, shape, sharding))
        self.stored.discard(index)

    def share_entry(self, index: int, source: BufferStorage, source_index: int) -> bool:
        """Shares an entry of another program's storage, until this storage stores to the entry.

        Returns False if shapes or dtypes differ.
        """
        own, other = self.buffer, source.buffer
        is_compatible = (
            own.tensor_shape == other.tensor_shape and own.tensor_dtype == other.tensor_dtype
        )
        if not (is_compatible and self._host == source._host):
            return False
        self._arrays.pop(index, None)
        self._shared_entries[index] = source, source_index
        return True

    # ---- files ----------------------------------------------------------------------------------
    @property
    def may_be_on_disk(self) -> bool:
        """True if remote-buffer entries, local or shared with another program, can be on disk."""
        return self._file is not None or bool(self._shared_entries)

    def disk_slot(self, index: int) -> tuple[EntryFile, int] | None:
        """Returns the file of a remote-buffer entry and its index in it; None if not on disk."""
        if index in self._shared_entries:
            source, source_index = self._shared_entries[index]
            return source.disk_slot(source_index)
        if self._file is None or index not in self._disk_indices:
            return None
        return self._file, self._disk_indices[index]

    def _shards_by_replica(self, array: jax.Array) -> dict[int, jax.Array]:
        """Returns this process's shards of a global array, by replica index."""
        return {
            (s.index[0].start or 0) // self._rows_per_replica: s.data
            for s in array.addressable_shards
        }


def _is_zeros(value: np.ndarray) -> bool:
    """True if all bits of an array are zero."""
    content = np.asarray(value, order="C").reshape(-1).view(np.uint8)
    end = content.size - content.size % 8
    if content[:_FIRST].any() or content[end:].any():
        return False
    return not content[:end].view(np.uint64).any()
