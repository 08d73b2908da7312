"""Rotary position embeddings (RoPE; Su et al., arXiv:2104.09864).

GPT-J rotates pairs of neighbouring features (`popxl_addons.ops.rotary_pos_embed`), Llama and its
relatives rotate feature i with feature i + rotary_dim / 2.
"""

from __future__ import annotations

import numpy as np

import popxl
from modelling.layers.module import cast_if_needed
from popxl import Tensor, ops

RopeTables = tuple[Tensor, ...]
"""sin and cos of each position, float32 ([batch,] positions, rotary_dim / 2); a third table,
([batch,] positions, 1), is a factor on queries."""


def constant_rope_tables(
    inv_freq: np.ndarray, num_positions: int, scale: float = 1.0
) -> RopeTables:
    """Returns sin and cos of positions 0, 1, ...: float32 (num_positions, rotary_dim / 2) each.

    Args:
        inv_freq: float32 (rotary_dim / 2,), radians from one position to the next.
        scale: factor on sin and cos.
    """
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * inv_freq[None]
    sin, cos = (
        popxl.constant(f(angles) * np.float32(scale), popxl.float32, name)
        for f, name in ((np.sin, "sin"), (np.cos, "cos"))
    )
    return sin, cos


def gather_rope_tables(tables: RopeTables, positions: Tensor) -> RopeTables:
    """Gathers the rows of the RoPE tables that belong to the given token positions.

    Args:
        positions: int32 (batch,), one for each sample, or (batch, n).

    Returns:
        (batch, 1 or n, rotary_dim / 2) each.
    """
    batch, count = (*positions.shape, 1)[:2]
    return tuple(ops.gather(t, positions).reshape((batch, count, t.shape[-1])) for t in tables)


def packed_rope_tables(tables: RopeTables, segment_starts: Tensor | None) -> RopeTables:
    """Returns RoPE tables of packed samples, whose positions restart at each sequence.

    Args:
        tables: of positions 0, 1, ..., (length, rotary_dim / 2) each.
        segment_starts: int32 (batch, length), the index in its sample at which each token's
            sequence starts; None: a sample is one sequence.

    Returns:
        (batch, length, rotary_dim / 2) each; `tables` if there are no segments.
    """
    if segment_starts is None:
        return tables
    index = popxl.constant(np.arange(segment_starts.shape[1])[None], popxl.int32, "positions")
    return gather_rope_tables(tables, index - segment_starts)


def apply_rotary_pos_emb(x: Tensor, sin: Tensor, cos: Tensor, rotary_dim: int) -> Tensor:
    """Rotates each feature pair (i, i + rotary_dim / 2) by the angle of its position.

    Computed in float32.

    Args:
        x: queries or keys, (batch, positions, heads, head_dim).
        sin, cos: see `RopeTables`.
        rotary_dim: number of features of a head that are rotated, the first ones.

    Returns:
        The shape and dtype of `x`.
    """
    half = rotary_dim // 2
    sin, cos = (table.reshape((*table.shape[:-1], 1, half)) for table in (sin, cos))
    first = cast_if_needed(x[..., :half], popxl.float32)
    second = cast_if_needed(x[..., half:rotary_dim], popxl.float32)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    parts = [cast_if_needed(t, x.dtype) for t in rotated]
    unrotated = [x[..., rotary_dim:]] if rotary_dim < x.shape[-1] else []
    return ops.concat([*parts, *unrotated], -1)
