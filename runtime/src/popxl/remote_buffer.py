"""Remote buffers: arrays of equally shaped entries in host memory, on the device, or on disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from popxl import context, dtypes
from popxl._ir.argument_checks import check_integer, check_integers
from popxl._ir.sharding import MetaShape, shard_elements

if TYPE_CHECKING:
    from popxl.tensor import Tensor, Variable


class RemoteBuffer:
    """Array of `entries` tensors of one shape and dtype per replica, in host memory by default.

    Programs move entries with `ops.remote_load` and `ops.remote_store`. Contents persist between
    runs of a session; entries that no remote variable initialises start as zeros.

    Attributes:
        kind: what it holds, a word for those who decide where entries live. Not in PopXL.
    """

    def __init__(
        self, tensor_shape: tuple[int, ...], tensor_dtype: dtypes.dtype, entries: int
    ) -> None:
        self._ir = context.get_ir()
        self.set_remote_buffer_info(tensor_dtype, tensor_shape, entries)
        self._meta_shape = MetaShape()
        self._variables: dict[int, Variable] = {}  # by entry
        self._resident: int | frozenset[int] = 0
        self._on_disk = 0
        self.kind = ""
        self._id = self._ir._register_buffer(self)

    def set_remote_buffer_info(
        self, tensor_dtype: dtypes.dtype, tensor_shape: tuple[int, ...], entries: int
    ) -> None:
        """Sets the dtype, shape and number (at least 1) of the buffer's entries."""
        self._dtype = dtypes.dtype.as_dtype(tensor_dtype)
        self._shape = check_integers("remote_buffer", "tensor_shape", tensor_shape)
        self.entries = entries

    @property
    def remote_buffer_id(self) -> int:
        return self._id

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of an entry on one replica: the shard's, if entries are sharded."""
        return self._shape

    @property
    def tensor_dtype(self) -> dtypes.dtype:
        return self._dtype

    @property
    def entries(self) -> int:
        return self._entries

    @entries.setter
    def entries(self, value: int) -> None:
        self._entries = check_integer("remote_buffer", "entries", value, 1)

    @property
    def resident(self) -> int:
        """Number of entries that stay in device memory; default: 0.

        Set to a number, for so many from the first on, or to the entries' indices. Loading such an
        entry is no transfer, but it takes its memory all the time. Results are the same bit for
        bit. May be set until a session is made.
        """
        return self._resident if isinstance(self._resident, int) else len(self._resident)

    @resident.setter
    def resident(self, which: int | Iterable[int]) -> None:
        if isinstance(which, Iterable):
            self._resident = frozenset(which)
            if any(i < 0 for i in self._resident):
                raise ValueError("the indices of resident entries must be at least 0")
            return
        if not isinstance(which, int) or isinstance(which, bool) or which < 0:
            raise ValueError(f"the number of resident entries must be at least 0, got {which!r}")
        self._resident = which

    @property
    def resident_entries(self) -> frozenset[int]:
        """Indices of the entries that stay in device memory. Not in PopXL."""
        chosen = range(self._resident) if isinstance(self._resident, int) else self._resident
        return frozenset(i for i in chosen if i < self.entries)

    @property
    def on_disk(self) -> int:
        """Number of entries stored in files on disk: the last ones that are not resident.

        Default: none. Not in PopXL.

        They take no memory of the host but for what is read ahead and written behind. The session
        needs a folder (`Session(..., disk=FOLDER)`). Results are the same bit for bit. May be set
        until a session is made.
        """
        return self._on_disk

    @on_disk.setter
    def on_disk(self, count: int) -> None:
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"the number of entries on disk must be at least 0, got {count!r}")
        self._on_disk = count

    @property
    def on_disk_entries(self) -> Sequence[int]:
        """Indices of the entries stored in files on disk, in order. Not in PopXL."""
        resident_entries = self.resident_entries
        others = [i for i in range(self.entries) if i not in resident_entries]
        return others[max(len(others) - self.on_disk, 0) :]

    @property
    def meta_shape(self) -> tuple[int, ...]:
        """Full shape of the tensor if entries are replica shards, otherwise ()."""
        return self._meta_shape

    @meta_shape.setter
    def meta_shape(self, value: tuple[int, ...]) -> None:
        self._meta_shape = MetaShape(value)

    def validate_tensor_matches_buffer(self, t: Tensor, num_shards: int = 1) -> None:
        """Raises ValueError unless a shard of `t` (one of `num_shards`) fits the entries.

        Shape and dtype must be equal.
        """
        shape = t.shape if num_shards == 1 else (shard_elements(t.shape, num_shards),)
        if shape != self.tensor_shape:
            raise ValueError(
                f"tensor {t.id!r} has shape {shape}, but the remote buffer's entries have "
                f"{self.tensor_shape}"
            )
        if t.dtype != self.tensor_dtype:
            raise ValueError(
                f"tensor {t.id!r} has dtype {t.dtype!r}, but the remote buffer's entries have "
                f"{self.tensor_dtype!r}"
            )

    def __repr__(self) -> str:
        return f"RemoteBuffer[{self._id} {self._dtype!r} {self._shape} entries={self._entries}" + (
            f" meta_shape={self._meta_shape}]" if self._meta_shape else "]"
        )


def remote_buffer(
    tensor_shape: tuple[int, ...], tensor_dtype: dtypes.dtype, entries: int = 1
) -> RemoteBuffer:
    """Creates a remote buffer in the current Ir (see `RemoteBuffer`)."""
    return RemoteBuffer(tensor_shape, tensor_dtype, entries)
