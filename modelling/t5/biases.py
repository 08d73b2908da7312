"""Biases of T5's attention scores: relative positions, and what keeps a sample's examples apart.

The examples of a sample lie side by side in the encoder, where the mask has their numbers. In the
decoder each is a sequence of its own, so that only cross-attention brings them together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

import popxl
from config.t5 import T5Config
from modelling.layers import MASKED, Axes, Module, cast, padding_bias, parameter, segment_bias
from popxl import Tensor, ops

_BATCH_FIRST = Axes()


@dataclass(frozen=True)
class Packing:
    """Masks and shapes of samples with up to `examples` examples.

    A mask is int32 (batch, encoder length): the number of the example that a token belongs to, from
    1, and 0 for padding.
    """

    examples: int
    sequences: int = 1
    """Decoder sequences of an example: several where generation searches with beams, or preferences
    are learned."""
    axes: Axes = _BATCH_FIRST
    """The order of axes in activations that `together` and `apart` take."""

    @classmethod
    def of(cls, config: T5Config, sequences: int = 1) -> Self:
        """The packing of a configuration's samples."""
        return cls(config.data.examples_per_row, sequences, Axes.of(config))

    @property
    def count(self) -> int:
        """Decoder sequences of a sample."""
        return self.examples * self.sequences

    def encoder_bias(self, mask: Tensor) -> Tensor:
        """Lets tokens see those of their example: float32, broadcasts to (batch, 1, q, k)."""
        return padding_bias(mask) if self.examples == 1 else segment_bias(mask, mask)

    def lengths(self, mask: Tensor) -> Tensor:
        """Tokens of each sample of one example, whose padding is at the end: int32 (batch,). At
        least 1, so that a sample of padding alone has a softmax."""
        return ops.maximum(ops.sum(mask, 1), popxl.constant(1, popxl.int32))

    def cross_bias(self, mask: Tensor, length: int) -> Tensor:
        """Lets the queries of each example's decoder sequences see its tokens in the encoder.

        Args:
            length: queries of a decoder sequence.

        Returns:
            float32, broadcasts to (batch, 1, examples * sequences * length, encoder length).
        """
        if self.examples == 1:
            return padding_bias(mask)
        numbers = np.repeat(
            np.arange(1, self.examples + 1, dtype=np.int32), self.sequences * length
        )
        return segment_bias(popxl.constant(numbers[None], popxl.int32, "examples"), mask)

    def is_there(self, mask: Tensor) -> Tensor:
        """Whether each example has any token: bool (batch * examples,)."""
        batch, length = mask.shape
        if self.examples == 1:
            return ops.cast(ops.max(mask, 1), popxl.bool)
        numbers = np.arange(1, self.examples + 1, dtype=np.int32).reshape(1, -1, 1)
        own = ops.equal(
            ops.reshape(mask, (batch, 1, length)), popxl.constant(numbers, popxl.int32, "examples")
        )
        there = ops.max(cast(own, popxl.int32), 2)
        return ops.cast(ops.reshape(there, (batch * self.examples,)), popxl.bool)

    def together(self, x: Tensor) -> Tensor:
        """(batch * n, length, hidden) -> (batch, n * length, hidden), n = examples * sequences."""
        x = self.axes.swap(x)
        sequences, length, hidden = x.shape
        return self.axes.swap(x.reshape((sequences // self.count, self.count * length, hidden)))

    def apart(self, x: Tensor) -> Tensor:
        """The inverse of `together`."""
        x = self.axes.swap(x)
        batch, length, hidden = x.shape
        return self.axes.swap(x.reshape((batch * self.count, length // self.count, hidden)))


def bucket_of(distance: np.ndarray, causal: bool, buckets: int, max_distance: int) -> np.ndarray:
    """The bucket of each distance (key position minus query position), int32.

    Half of the buckets hold one distance each, the other half ranges that grow logarithmically
    up to `max_distance` and beyond (Raffel et al., arXiv:1910.10683, section 2.1). Without `causal`
    the buckets are shared out to the two directions; with it, keys after the query (which are
    masked) get bucket 0.
    """
    if causal:
        base, distance = np.zeros_like(distance), np.maximum(-distance, 0)
    else:
        buckets //= 2
        base, distance = np.where(distance > 0, buckets, 0), np.abs(distance)
    exact = buckets // 2
    # float32, as where the published weights were trained: it decides on which side of a border
    # a distance falls. The distances below `exact` are only kept away from the logarithm.
    ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
    log_ratio = np.log(ratio) / np.float32(math.log(max_distance / exact))
    far = exact + (log_ratio * np.float32(buckets - exact)).astype(np.int32)
    bucket = np.where(distance < exact, distance, np.minimum(far, buckets - 1))
    return (base + bucket).astype(np.int32)


class RelativePosition(Module):
    """Biases of attention scores by the distance of key and query.

    Args:
        causal: hide keys after the query, and use all buckets for the others.
        is_shared: whether the weight, (buckets, heads), is that of the stack's first block.
    """

    def __init__(self, causal: bool, is_shared: bool = False) -> None:
        super().__init__()
        model: Any = self.config.model
        self.attention, self.causal, self.is_shared = model.attention, causal, is_shared
        buckets, heads = self.attention.relative_attention_num_buckets, self.attention.heads
        self.heads = heads // self.config.execution.tensor_parallel
        self.weight = parameter(buckets, heads, std=model.hidden_size**-0.5, shard=1)

    def build(self, queries: int, keys: int) -> Tensor:
        """Biases for queries 0, 1, ... and keys 0, 1, ...: float32 (1, heads, queries, keys)."""
        # All entries of a diagonal are equal, so there are only queries + keys different ones.
        # A gather for each entry would have, as its gradient, a scatter of queries * keys rows
        # into a few buckets, which is slow everywhere.
        period = queries + keys
        position = np.arange(period)
        distance = np.where(position < keys, position, position - period)
        by_distance = self._bias(distance)  # (heads, period)
        return _along_diagonals(by_distance, queries, keys)

    def row(self, query: Tensor, keys: int) -> Tensor:
        """Biases for one query, to generate: float32 (1, heads, 1, keys).

        Args:
            query: position of the query, int32 (), in [0, keys).
        """
        table = np.arange(keys) - np.arange(keys)[:, None]  # (query, key)
        buckets = popxl.constant(self._buckets(table), popxl.int32, "buckets")
        row = ops.gather(self.weight, ops.gather(buckets, query))  # (keys, heads)
        bias = ops.transpose(cast(row, popxl.float32))
        if self.causal:
            masks = popxl.constant(_causal_mask(table), popxl.float32, "causal_masks")
            bias = bias + ops.gather(masks, query)
        return bias.reshape((1, self.heads, 1, keys))

    def _buckets(self, distance: np.ndarray) -> np.ndarray:
        return bucket_of(
            distance,
            self.causal,
            self.attention.relative_attention_num_buckets,
            self.attention.relative_attention_max_distance,
        )

    def _bias(self, distance: np.ndarray) -> Tensor:
        """float32 (heads, n) for constant distances (n,)."""
        buckets = popxl.constant(self._buckets(distance), popxl.int32, "buckets")
        bias = ops.transpose(cast(ops.gather(self.weight, buckets), popxl.float32))
        if not self.causal:
            return bias
        return bias + popxl.constant(_causal_mask(distance), popxl.float32, "causal_mask")


def _causal_mask(distance: np.ndarray) -> np.ndarray:
    return np.where(distance > 0, MASKED, 0).astype(np.float32)


def _along_diagonals(t: Tensor, rows: int, columns: int) -> Tensor:
    """out[0, h, i, j] = t[h, (j - i) mod period], for t of shape (h, period).

    Copies of t in a line, read in rows that are one shorter than t, move on by one in each row:
    row i begins at element i * (period - 1) = i * period - i.
    """
    heads, period = t.shape
    copies = t.reshape((heads, 1, period)) * popxl.constant(np.ones((rows, 1)), t.dtype, "copies")
    line = copies.reshape((heads, rows * period))
    skewed = ops.slice(line, 0, rows * (period - 1), axis=1).reshape((heads, rows, period - 1))
    # The index arithmetic is done once, not in each pass over the scores.
    return ops.materialise(ops.slice(skewed, 0, columns, axis=2).reshape((1, heads, rows, columns)))
