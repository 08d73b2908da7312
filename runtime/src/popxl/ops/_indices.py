"""Indices that only a running program knows, and what those out of range mean (docs/ops.md)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def in_range(indices: Any, size: int) -> Any:
    """True for the indices in [0, size), of any integer dtype."""
    wide = indices if indices.dtype == jnp.uint32 else indices.astype(jnp.int32)
    return (wide >= 0) & (wide < size)


def as_int32(indices: Any) -> Any:
    """Indices as int32; those that are too large for it become the largest."""
    if indices.dtype == jnp.uint32:
        indices = jnp.minimum(indices, jnp.uint32(jnp.iinfo(jnp.int32).max))
    return indices.astype(jnp.int32)


def nearest(indices: Any, size: int) -> Any:
    """Indices in [0, size) as int32; those out of range become the nearest in range."""
    return jnp.clip(as_int32(indices), 0, size - 1)


def dropped_outside(indices: Any, size: int) -> Any:
    """Indices as int32, `size` for those out of range, which JAX's mode "drop" leaves out; it would
    count negative ones from the end."""
    return jnp.where(in_range(indices, size), indices.astype(jnp.int32), size)
