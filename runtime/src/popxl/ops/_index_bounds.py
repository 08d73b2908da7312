"""Bounds of index tensors: constants are checked; others clamp or drop (docs/ops.md)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from popxl.tensor import Constant, Tensor


def check_known(op: str, indices: Tensor, sizes: int | np.ndarray) -> None:
    """Refuse a constant that has an index out of range.

    Args:
        sizes: number of elements to choose from, or an array that broadcasts to `indices`.

    Raises:
        IndexError: an index is outside [0, size).
    """
    if not isinstance(indices, Constant):
        return
    data = indices._data.astype(np.int64)
    limits = np.broadcast_to(sizes, data.shape)
    outside = (data < 0) | (data >= limits)
    if outside.any():
        raise IndexError(
            f"{op}: index {data[outside][0]} of constant {indices.id!r} is out of range: it must "
            f"be at least 0 and below {limits[outside][0]}"
        )


def in_range(indices: Any, size: int) -> Any:
    """True for the indices in [0, size), of any integer dtype."""
    wide = indices if indices.dtype == jnp.uint32 else indices.astype(jnp.int32)
    return (wide >= 0) & (wide < size)


def as_int32(indices: Any) -> Any:
    """Indices as int32; those that are too large for it become the largest."""
    if indices.dtype == jnp.uint32:
        indices = jnp.minimum(indices, jnp.uint32(jnp.iinfo(jnp.int32).max))
    return indices.astype(jnp.int32)


def clamp_indices(indices: Any, size: int) -> Any:
    """Indices in [0, size) as int32; those out of range become the nearest in range."""
    return jnp.clip(as_int32(indices), 0, size - 1)


def indices_or_size(indices: Any, size: int) -> Any:
    """Indices as int32, `size` for those out of range, which JAX's mode "drop" leaves out; it would
    count negative ones from the end."""
    return jnp.where(in_range(indices, size), indices.astype(jnp.int32), size)
