"""T5's relative position biases of attention scores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import popxl
from modelling.layers import MASK_VALUE, PositionBias, cast_if_needed, parameter
from popxl import Tensor, ops


def relative_position_bucket(
    distance: np.ndarray, causal: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
    """Returns the bucket of each distance (key position minus query position): any shape -> int32.

    Half of the buckets hold one distance each, the other half ranges that grow logarithmically up
    to `max_distance` and beyond (Raffel et al., arXiv:1910.10683, section 2.1). Without `causal`,
    each direction has half of the buckets; with it, keys after the query, which are masked, get
    bucket 0.
    """
    if causal:
        base, distance = np.zeros_like(distance), np.maximum(-distance, 0)
    else:
        num_buckets //= 2
        base, distance = np.where(distance > 0, num_buckets, 0), np.abs(distance)
    exact = num_buckets // 2
    # float32, in which the published weights were trained: rounding decides on which side of a
    # boundary a distance falls. Distances below `exact` are clipped: their logarithm is not used.
    ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
    log_ratio = np.log(ratio) / np.float32(math.log(max_distance / exact))
    far = exact + (log_ratio * np.float32(num_buckets - exact)).astype(np.int32)
    bucket = np.where(distance < exact, distance, np.minimum(far, num_buckets - 1))
    return (base + bucket).astype(np.int32)


class RelativePositionBias(PositionBias):
    """Learned biases of attention scores, by bucketed distance of key and query.

    Args:
        causal: mask keys after the query, and use all buckets for the others.
        is_shared: True if the stack's first block owns the weight, (buckets, heads).
    """

    def __init__(self, causal: bool, is_shared: bool = False) -> None:
        super().__init__()
        model: Any = self.config.model
        self.attention, self.causal, self.is_shared = model.attention, causal, is_shared
        buckets, heads = self.attention.relative_attention_num_buckets, self.attention.heads
        self.heads = heads // self.config.execution.tensor_parallel
        self.weight = parameter(buckets, heads, std=model.hidden_size**-0.5, shard=1)

    def build(self, queries: int, keys: int) -> Tensor:
        """Returns biases of positions 0, 1, ...: float32 (1, local heads, queries, keys)."""
        # All entries of a diagonal are equal, so there are only queries + keys different ones.
        # The gradient of a gather of each entry would be a scatter of queries * keys rows into a
        # few buckets, which is slow on every device.
        period = queries + keys
        position = np.arange(period)
        distance = np.where(position < keys, position, position - period)
        bias_of_distance = self._bias_of_distance(distance)  # (heads, period)
        return _expand_diagonals(bias_of_distance, queries, keys)

    def bias_of_query(self, position: Tensor, keys: int) -> Tensor:
        """Returns the bias of one query: position, int32 scalar -> (1, local heads, 1, keys)."""
        farthest = keys - 1
        bias_of_distance = self._bias_of_distance(np.arange(-farthest, keys))
        start = popxl.constant(farthest, popxl.int32, "farthest") - position
        row = ops.dynamic_slice(bias_of_distance, start, [1], [keys], no_overlap=True)
        return row.reshape((1, row.shape[0], 1, keys))

    def _bias_of_distance(self, distance: np.ndarray) -> Tensor:
        """Looks up biases of constant distances: (n,) -> float32 (local heads, n)."""
        attention = self.attention
        bucket_of_distance = relative_position_bucket(
            distance,
            self.causal,
            attention.relative_attention_num_buckets,
            attention.relative_attention_max_distance,
        )
        buckets = popxl.constant(bucket_of_distance, popxl.int32, "buckets")
        bias = ops.transpose(cast_if_needed(ops.gather(self.weight, buckets), popxl.float32))
        if not self.causal:
            return bias
        mask = np.where(distance > 0, MASK_VALUE, 0).astype(np.float32)
        return bias + popxl.constant(mask, popxl.float32, "causal_mask")


def _expand_diagonals(t: Tensor, rows: int, columns: int) -> Tensor:
    """Returns out[0, h, i, j] = t[h, (j - i) mod period]: -> (1, heads, rows, columns).

    The input t is (heads, period).

    Copies of t, concatenated and read in rows of period - 1 elements, shift by one in each row: row
    i begins at element i * (period - 1) = i * period - i.
    """
    heads, period = t.shape
    copies = t.reshape((heads, 1, period)) * popxl.constant(np.ones((rows, 1)), t.dtype, "copies")
    concatenated = copies.reshape((heads, rows * period))
    skewed = ops.slice(concatenated, 0, rows * (period - 1), axis=1).reshape(
        (heads, rows, period - 1)
    )
    # Materialized, so that the index arithmetic is done once, not in each pass over the scores.
    return ops.materialise(ops.slice(skewed, 0, columns, axis=2).reshape((1, heads, rows, columns)))
