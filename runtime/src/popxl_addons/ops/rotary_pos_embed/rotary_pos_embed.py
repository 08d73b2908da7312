"""Rotary position embedding (RoPE; Su et al., 2021) with interleaved pairs, as in GPT-J."""

from __future__ import annotations

from typing import Any

import numpy as np

import popxl
from popxl import ops
from popxl_addons.utils import cast_if_needed

__all__ = ["rotary_pos_embed", "trig_table_constants", "trig_tables"]


def trig_tables(
    seq_len: int, rotary_dim: int, base: int = 10000, np_dtype: Any = "float32"
) -> tuple[np.ndarray, np.ndarray]:
    """Compute sin and cos of the angles position / base**(2i / rotary_dim).

    All arithmetic is done in `np_dtype`, as the models do whose weights are used with it: tables
    computed in float64 and rounded differ from theirs near the zeros of sine and cosine.

    Returns:
        sin and cos, each (seq_len, rotary_dim / 2).

    Raises:
        ValueError: `rotary_dim` is odd.
    """
    if rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even, but is {rotary_dim}")
    dtype = np.dtype(np_dtype)
    number = dtype.type
    exponents = np.arange(0, rotary_dim, 2).astype(dtype) / number(rotary_dim)
    frequencies = number(1) / number(base) ** exponents
    angles = np.arange(seq_len).astype(dtype)[:, None] * frequencies
    return np.sin(angles), np.cos(angles)


def trig_table_constants(
    seq_len: int, rotary_dim: int, base: int = 10000, dtype: popxl.dtype = popxl.float32
) -> tuple[popxl.Tensor, popxl.Tensor]:
    """Return `trig_tables` as constants of the current graph, with dtype `dtype`."""
    sin, cos = trig_tables(seq_len, rotary_dim, base, dtype.as_numpy())
    return popxl.constant(sin, dtype, "sin"), popxl.constant(cos, dtype, "cos")


def rotary_pos_embed(
    t: popxl.Tensor, sin: popxl.Tensor, cos: popxl.Tensor, rotary_dim: int | None = None
) -> popxl.Tensor:
    """Rotate each pair of adjacent features (2i, 2i + 1) by the angle of its position.

    Su et al., arXiv:2104.09864.

    Args:
        t: (batch, sequence, heads, head size).
        sin, cos: (sequence, rotary_dim / 2), see `trig_tables`, or (batch, sequence,
            rotary_dim / 2) for positions that differ between samples.
        rotary_dim: how many of the first elements of each head are rotated; the others stay.
            Default, and 0: all.

    Returns:
        The rotated tensor, in the dtype of `t`; computed in float32.

    Raises:
        ValueError: `t` is not of rank 4, or the tables do not have the shape stated.
    """
    if t.rank != 4:
        raise ValueError(
            f"rotary_pos_embed takes a tensor (batch, sequence, heads, head size), not {t.shape}"
        )
    rotary_dim = rotary_dim or t.shape[-1]
    sin, cos = (_broadcast_over_heads(table, t, rotary_dim) for table in (sin, cos))
    kept, rotated = t[..., rotary_dim:], t[..., :rotary_dim]
    pairs = cast_if_needed(rotated, popxl.float32).reshape((*t.shape[:-1], rotary_dim // 2, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = [even * cos - odd * sin, odd * cos + even * sin]
    joined = ops.concat([x.reshape((*x.shape, 1)) for x in turned], -1)
    result = cast_if_needed(ops.reshape(joined, rotated.shape), t.dtype)
    return result if rotary_dim == t.shape[-1] else ops.concat([result, kept], -1)


def _broadcast_over_heads(table: popxl.Tensor, t: popxl.Tensor, rotary_dim: int) -> popxl.Tensor:
    """Reshape a table to broadcast with (batch, sequence, heads, rotary_dim / 2)."""
    batch, sequence, _, size = t.shape
    wanted = (sequence, rotary_dim // 2)
    if table.shape not in (wanted, (batch, *wanted)) or rotary_dim > size or rotary_dim % 2:
        raise ValueError(
            f"rotary_pos_embed of {t.shape} with rotary_dim {rotary_dim} needs tables of shape "
            f"{wanted} or {(batch, *wanted)}, but got {table.shape}"
        )
    return cast_if_needed(table, popxl.float32).reshape((*table.shape[:-1], 1, wanted[1]))
