"""Rotary positions (Su et al., arXiv:2104.09864): features of a head turned by angles.

GPT-J turns neighbouring features (`popxl_addons.ops.rotary_pos_embed`), Llama and those like it the
first half of the features with the second.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import popxl
from modelling.layers.module import cast
from popxl import Tensor, ops

RopeTables = tuple[Tensor, ...]
"""Sines and cosines of the angles of positions, float32 ([batch,] positions, rotated / 2); a third
one, ([batch,] positions, 1), is a factor on queries."""

Rotate = Callable[..., Tensor]
"""Turns (batch, positions, heads, head size) by sines and cosines, of so many first features."""


def constant_rope_tables(frequencies: np.ndarray, positions: int, scale: float = 1.0) -> RopeTables:
    """The angles of positions 0, 1, ...

    Args:
        frequencies: float32 (rotated / 2,), radians from one position to the next.
        scale: factor on sines and cosines.
    """
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None]
    sin, cos = (
        popxl.constant(f(angles) * np.float32(scale), popxl.float32, name)
        for f, name in ((np.sin, "sin"), (np.cos, "cos"))
    )
    return sin, cos


def gather_rope_tables(tables: RopeTables, positions: Tensor) -> RopeTables:
    """The angles of some positions.

    Args:
        positions: int32 (batch,), one for each sample, or (batch, n).

    Returns:
        Tables (batch, 1 or n, rotated / 2).
    """
    batch, count = (*positions.shape, 1)[:2]
    return tuple(ops.gather(t, positions).reshape((batch, count, t.shape[-1])) for t in tables)


def packed_rope_tables(tables: RopeTables, segment_starts: Tensor | None) -> RopeTables:
    """The angles of all tokens of samples: tables, or those of positions that start anew.

    Args:
        tables: of positions 0, 1, ...
        starts: int32 (batch, length), where each token's text starts; None: a sample is one text.
    """
    if segment_starts is None:
        return tables
    places = popxl.constant(np.arange(segment_starts.shape[1])[None], popxl.int32, "positions")
    return gather_rope_tables(tables, places - segment_starts)


def apply_rotary_pos_emb(t: Tensor, sin: Tensor, cos: Tensor, rotary_dim: int) -> Tensor:
    """Turn each pair of features i and i + rotated / 2 by its position's angle.

    Args:
        t: (batch, positions, heads, head size).
        sin, cos: see `RopeTables`.
        rotated: how many of the first features of a head are turned; the others stay.

    Returns:
        As `t`, computed in float32.
    """
    half = rotary_dim // 2
    sin, cos = (table.reshape((*table.shape[:-1], 1, half)) for table in (sin, cos))
    first, second = cast(t[..., :half], popxl.float32), cast(t[..., half:rotary_dim], popxl.float32)
    turned = [first * cos - second * sin, second * cos + first * sin]
    parts = [cast(x, t.dtype) for x in turned]
    kept = [t[..., rotary_dim:]] if rotary_dim < t.shape[-1] else []
    return ops.concat([*parts, *kept], -1)
