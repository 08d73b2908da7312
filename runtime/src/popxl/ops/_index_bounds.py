"""Bounds of index tensors: constants are checked; other indices are clamped or dropped."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from popxl.tensor import Constant, Tensor


def check_constant_indices(op: str, indices: Tensor, sizes: int | np.ndarray) -> None:
    """Raises for a constant index tensor that holds an index out of range.

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


def is_in_range(indices: Any, size: int) -> Any:
    """Returns True for each index in [0, size), for indices of any integer dtype."""
    wide = indices if indices.dtype == jnp.uint32 else indices.astype(jnp.int32)
    return (wide >= 0) & (wide < size)


def as_int32(indices: Any) -> Any:
    """Converts index tensors to int32; larger values become the largest int32."""
    if indices.dtype == jnp.uint32:
        indices = jnp.minimum(indices, jnp.uint32(jnp.iinfo(jnp.int32).max))
    return indices.astype(jnp.int32)


def clamp_indices(indices: Any, size: int) -> Any:
    """Clamps indices to [0, size), as int32."""
    return jnp.clip(as_int32(indices), 0, size - 1)


def indices_or_size(indices: Any, size: int) -> Any:
    """Converts indices to int32, with `size` for those out of range.

    JAX's mode "drop" leaves `size` out; it would count negative indices from the end.
    """
    return jnp.where(is_in_range(indices, size), indices.astype(jnp.int32), size)
