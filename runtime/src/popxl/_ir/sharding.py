"""Sharding arithmetic: how a tensor is split over replicas.

A tensor of n elements is flattened, padded with zeros and split into `count` shards of
ceil(n / count) elements. In a group with more replicas than shards, replica i of the group holds
shard i % count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


class MetaShape(tuple[int, ...]):
    """Full shape of a tensor that is a shard; () for a tensor that is not sharded.

    To programs it is a plain tuple. It also holds the number of shards, which thus follows the
    shape to buffers, loaded tensors and graph inputs.

    Attributes:
        shards: number of shards; None if the program gave a shape alone.
    """

    shards: int | None

    def __new__(cls, shape: Iterable[int] = (), shards: int | None = None) -> MetaShape:
        self = super().__new__(cls, map(int, shape))
        self.shards = getattr(shape, "shards", None) if shards is None else shards
        return self


def shard_elements(shape: Iterable[int], count: int) -> int:
    """Returns the elements per shard when a tensor of `shape` is split into `count` shards."""
    return -(-math.prod(shape) // count)


def shard_count(full_shape: Iterable[int], elements: int, group_size: int) -> int:
    """Returns the number of shards of a tensor in a group of `group_size` replicas.

    Args:
        full_shape: shape of the tensor; the number of a `MetaShape` with one is returned.
        elements: number of elements of a shard; it decides for a plain shape. One shard for each
            replica is preferred.

    Raises:
        ValueError: no number of shards fits, or several do.
    """
    shards: int | None = getattr(full_shape, "shards", None)
    if shards is not None:
        if group_size % shards:
            raise ValueError(
                f"a tensor of shape {tuple(full_shape)} is split into {shards} shards, a number "
                f"that does not divide groups of {group_size} replicas"
            )
        return shards
    shape = tuple(full_shape)
    divisors = [n for n in range(1, group_size + 1) if group_size % n == 0]
    counts = [n for n in divisors if shard_elements(shape, n) == elements]
    if group_size in counts:
        return group_size
    if len(counts) != 1:
        problem = f"{counts} shards all" if counts else f"none of {divisors} shards"
        raise ValueError(
            f"of a tensor of shape {shape}, {problem} have {elements} elements: make the buffer "
            "with popxl.replica_sharded_buffer, which knows the number"
        )
    return counts[0]


def common_meta_shape(metas: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the full shape that all given sharded tensors have; () if none is sharded.

    Prefers one with a known number of shards.
    """
    shapes = [m for m in metas if m]
    if not shapes:  # the usual case, and this runs for every op
        return ()
    with_shards = [m for m in shapes if getattr(m, "shards", None) is not None]
    if len(set(shapes)) != 1 or len({m.shards for m in with_shards}) > 1:  # type: ignore[attr-defined]
        return ()
    return (with_shards or shapes)[0]
