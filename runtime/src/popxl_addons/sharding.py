"""The rule by which tensors are sharded over replicas, and the resulting specs.

A tensor of n elements is cut into `shards` flat parts if that divides n; otherwise it stays whole,
as step counters and odd biases do. Nothing is padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from popxl import TensorSpec, dtype
from popxl._ir.sharding import MetaShape, shard_count, shard_elements


def effective_shards(shape: Iterable[int], shards: int) -> int:
    """Number of shards of a tensor of `shape`: the requested `shards` if they are equal, else 1."""
    elements = math.prod(shape)
    return 1 if elements < shards or elements % shards else shards


def sharded_spec(shape: Iterable[int], dtype: dtype, shards: int) -> TensorSpec:
    """Spec of one of `shards` shards; the full tensor's spec if it cannot be sharded."""
    shape = tuple(shape)
    shards = effective_shards(shape, shards)
    if shards == 1:
        return TensorSpec(shape, dtype)
    return TensorSpec((shard_elements(shape, shards),), dtype, MetaShape(shape, shards))


def num_shards_of_spec(spec: TensorSpec, group_size: int) -> int:
    """Number of shards of the tensor that a shard spec belongs to: a divisor of `group_size`.

    Raises:
        ValueError: it does not come from groups of that size.
    """
    if not spec.meta_shape:
        return 1
    return shard_count(spec.meta_shape, math.prod(spec.shape), group_size)
