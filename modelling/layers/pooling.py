"""Pooling: one vector for each sequence, from those of its tokens."""

from __future__ import annotations

import numpy as np

import popxl
from modelling.layers.activation_layout import ActivationLayout
from modelling.layers.module import cast_if_needed
from popxl import Tensor, ops


def pool_sequences(
    x: Tensor, pooled_ids: Tensor, sequences_per_sample: int, layout: ActivationLayout
) -> Tensor:
    """Returns the mean of each sequence's pooled tokens; zeros if it has none.

    One product adds all up: with one pooled token a sequence the result is that token's vector.

    Args:
        x: (batch, length, hidden), equal on the replicas of a tensor-parallel group.
        pooled_ids: int32 (batch, length), see `data.pooling`.
        layout: of `x`.

    Returns:
        float32 (batch * sequences_per_sample, hidden), a sample's sequences in order.
    """
    batch, length = pooled_ids.shape
    count = sequences_per_sample
    numbers = np.arange(1, count + 1, dtype=np.int32).reshape(1, count, 1)
    sequences: Tensor = popxl.constant(numbers, popxl.int32, "sequences")
    is_pooled = ops.equal(pooled_ids.reshape((batch, 1, length)), sequences)
    x = layout.transpose_if_sequence_first(x)
    total = ops.matmul(cast_if_needed(is_pooled, x.dtype), x, output_type=popxl.float32)
    tokens = ops.sum(cast_if_needed(is_pooled, popxl.float32), 2, keepdims=True)
    mean = total / ops.maximum(tokens, popxl.constant(1.0, popxl.float32))
    return mean.reshape((batch * count, x.shape[-1]))
