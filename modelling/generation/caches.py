"""Key/value caches: what a layer keeps of the positions it has read."""

from __future__ import annotations

from collections.abc import Sequence

from popxl import Tensor, ops

POSITIONS = 2
"""Axis of the positions in keys and values, (batch, heads, positions, head_size)."""


def put(caches: Sequence[Tensor], slot: Tensor, new: Sequence[Tensor]) -> list[Tensor]:
    """A layer's keys and values with those of one position in place.

    Args:
        caches: keys and values of all positions.
        slot: of the position, int32 scalar.
        new: key and value of the position, (batch, heads, 1, head_size) each.
    """
    return [
        ops.dynamic_update(cache, slot, t, [POSITIONS], [1], no_overlap=True)
        for cache, t in zip(caches, new, strict=True)
    ]


def continued(caches: Sequence[Tensor], parents: Sequence[Tensor]) -> list[Tensor]:
    """The caches of the sequences that are continued.

    Args:
        parents: none, or `Advance.parents` alone.
    """
    return [ops.gather(cache, p) for cache in caches for p in parents] or list(caches)
