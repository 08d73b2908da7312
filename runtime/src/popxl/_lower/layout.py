"""How an entry of a remote buffer is stored in host memory.

CPU and GPU store entries as they are. TPU moves slices of host memory only in whole tiles, so an
entry is stored as (rows, 128) with rows a multiple of the tile height, padded with zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from popxl.remote_buffer import RemoteBuffer

_LANES = 128
_BYTES_PER_TILE_COLUMN = 32  # 8 rows of 4-byte, 16 of 2-byte, 32 of 1-byte elements


@dataclass(frozen=True)
class Layout:
    """Stored form of entries. `tiled`: the TPU form."""

    tiled: bool = False

    def stored_shape(self, buffer: RemoteBuffer) -> tuple[int, ...]:
        """Shape of one stored entry."""
        if not self.tiled:
            return buffer.tensor_shape
        rows = -(-math.prod(buffer.tensor_shape) // _LANES)
        height = _BYTES_PER_TILE_COLUMN // buffer.tensor_dtype.itemsize
        return (max(height, -(-rows // height) * height), _LANES)

    def pack(self, value: Any, buffer: RemoteBuffer) -> Any:
        """Entry -> stored form. Works on device arrays and numpy arrays."""
        if not self.tiled:
            return value
        xp = np if isinstance(value, np.ndarray) else jnp
        shape = self.stored_shape(buffer)
        flat = value.reshape(-1)
        return xp.pad(flat, (0, math.prod(shape) - flat.size)).reshape(shape)

    def unpack(self, stored: Any, buffer: RemoteBuffer) -> Any:
        """Stored form -> entry."""
        if not self.tiled:
            return stored
        return stored.reshape(-1)[: math.prod(buffer.tensor_shape)].reshape(buffer.tensor_shape)
