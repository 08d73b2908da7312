"""Attention masks as biases that are added to the scores before the softmax."""

from __future__ import annotations

import popxl
from modelling.layers.module import cast_if_needed
from popxl import Tensor, ops

MASK_VALUE = -1e9
"""Added to a float32 score, it makes the probability 0, and a sum of several does not overflow."""


def invert_mask(mask: Tensor) -> Tensor:
    """Converts a mask of positions to keep (1) into one of positions to drop, and vice versa.

    1 keeps a position here, in T5X and in Hugging Face's models; 1 drops it in Transformer Engine.

    Args:
        mask: zeros and ones, int32 or bool, any shape.
    """
    return ops.logical_not(mask) if mask.dtype == popxl.bool else 1 - mask


def padding_bias(mask: Tensor) -> Tensor:
    """Returns the bias that masks padding: int32 (batch, keys) -> float32 (batch, 1, 1, keys)."""
    batch, keys = mask.shape
    dropped = cast_if_needed(invert_mask(mask), popxl.float32)
    return ops.reshape(dropped * MASK_VALUE, (batch, 1, 1, keys))


def causal_bias(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Returns the bias that masks keys after the query, and those `window` or more before it.

    Args:
        query_positions: int32 (batch or 1, queries).
        key_positions: int32 (batch or 1, keys).

    Returns:
        float32 (batch or 1, 1, queries, keys).
    """
    rows = query_positions.reshape((query_positions.shape[0], 1, query_positions.shape[1], 1))
    columns = key_positions.reshape((key_positions.shape[0], 1, 1, key_positions.shape[1]))
    hidden = ops.greater(columns, rows)
    if window is not None:
        last_hidden = popxl.constant(window - 1, popxl.int32, "window")
        hidden = ops.logical_or(hidden, ops.greater(rows - columns, last_hidden))
    return cast_if_needed(hidden, popxl.float32) * MASK_VALUE


def segment_bias(query_segments: Tensor, key_segments: Tensor) -> Tensor:
    """Returns the bias that masks keys of other packed sequences (segments) than the query's.

    Args:
        query_segments: int32 (batch or 1, queries), the segment id of each query.
        key_segments: int32 (batch, keys), the segment id of each key.

    Returns:
        float32 (batch, 1, queries, keys).
    """
    rows = ops.reshape(query_segments, (query_segments.shape[0], 1, query_segments.shape[1], 1))
    columns = ops.reshape(key_segments, (key_segments.shape[0], 1, 1, key_segments.shape[1]))
    return cast_if_needed(ops.logical_not(ops.equal(rows, columns)), popxl.float32) * MASK_VALUE
