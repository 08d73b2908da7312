"""Rotary position embedding (Su et al., RoFormer, 2021), as GPT-J applies it."""

from __future__ import annotations

from typing import Any

import numpy as np

import popxl
from popxl import ops

__all__ = ["rotary_pos_embed", "trig_table_constants", "trig_tables"]


def trig_tables(
    seq_len: int, rotary_dim: int, base: int = 10000, np_dtype: Any = "float32"
) -> tuple[np.ndarray, np.ndarray]:
    """Sines and cosines of the angles position / base**(2i / rotary_dim).

    Returns:
        sin and cos, each (seq_len, rotary_dim / 2).

    Raises:
        ValueError: `rotary_dim` is odd.
    """
    if rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even, but is {rotary_dim}")
    frequencies = base ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    angles = np.outer(np.arange(seq_len), frequencies)
    return np.sin(angles).astype(np_dtype), np.cos(angles).astype(np_dtype)


def trig_table_constants(
    seq_len: int, rotary_dim: int, base: int = 10000, dtype: popxl.dtype = popxl.float32
) -> tuple[popxl.Tensor, popxl.Tensor]:
    """`trig_tables` as constants of the current graph."""
    sin, cos = trig_tables(seq_len, rotary_dim, base)
    return popxl.constant(sin, dtype, "sin"), popxl.constant(cos, dtype, "cos")


def rotary_pos_embed(
    t: popxl.Tensor, sin: popxl.Tensor, cos: popxl.Tensor, rotary_dim: int | None = None
) -> popxl.Tensor:
    """Rotate each pair of neighbouring elements (2i, 2i + 1) by its position's angle.

    Args:
        t: (..., seq_len, head_dim).
        sin, cos: (seq_len, rotary_dim / 2), see `trig_tables`; axes before these two, for
            positions that differ between samples, broadcast against those of `t`.
        rotary_dim: how many of the first elements of each head are rotated; the others stay.
            Default: all.

    Returns:
        The rotated tensor, in the dtype of `t`; computed in float32.

    Raises:
        ValueError: the tables do not have the shape stated.
    """
    rotary_dim = t.shape[-1] if rotary_dim is None else rotary_dim
    wanted = (t.shape[-2], rotary_dim // 2)
    if sin.shape[-2:] != wanted or cos.shape[-2:] != wanted:
        raise ValueError(
            f"rotary_pos_embed of {t.shape} with rotary_dim {rotary_dim} needs tables of shape "
            f"{wanted}, but got {sin.shape} and {cos.shape}"
        )
    kept, rotated = t[..., rotary_dim:], t[..., :rotary_dim]
    pairs = _wide(rotated).reshape((*t.shape[:-1], rotary_dim // 2, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    sin, cos = _wide(sin), _wide(cos)
    turned = [even * cos - odd * sin, odd * cos + even * sin]
    joined = ops.concat([x.reshape((*x.shape, 1)) for x in turned], -1)
    result = ops.reshape(joined, rotated.shape)
    result = result if t.dtype == popxl.float32 else ops.cast(result, t.dtype)
    return result if rotary_dim == t.shape[-1] else ops.concat([result, kept], -1)


def _wide(t: popxl.Tensor) -> popxl.Tensor:
    return t if t.dtype == popxl.float32 else ops.cast(t, popxl.float32)
