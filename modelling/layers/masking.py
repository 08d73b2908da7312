"""Masks, as numbers that are added to scores before a softmax."""

from __future__ import annotations

import popxl
from modelling.layers.module import cast
from popxl import Tensor, ops

MASK_VALUE = -1e9
"""Added to a score in float32, it makes the probability 0, and it never overflows, however many
masks add up."""


def invert_mask(mask: Tensor) -> Tensor:
    """The mask in the other convention: 1 keeps a position (here, T5X, Hugging Face), or 1 drops it
    (Transformer Engine). It is its own inverse.

    Args:
        mask: of zeros and ones, int32 or bool.
    """
    return ops.logical_not(mask) if mask.dtype == popxl.bool else 1 - mask


def padding_bias(mask: Tensor) -> Tensor:
    """Hide padding. mask: int32 (batch, keys), 1 = token -> float32 (batch, 1, 1, keys)."""
    batch, keys = mask.shape
    dropped = cast(invert_mask(mask), popxl.float32)
    return ops.reshape(dropped * MASK_VALUE, (batch, 1, 1, keys))


def segment_bias(queries: Tensor, keys: Tensor) -> Tensor:
    """Hide the keys of other segments.

    Args:
        queries: int32 (batch or 1, queries), the number of each one's segment.
        keys: int32 (batch, keys), likewise.

    Returns:
        float32 (batch, 1, queries, keys).
    """
    rows = ops.reshape(queries, (queries.shape[0], 1, queries.shape[1], 1))
    columns = ops.reshape(keys, (keys.shape[0], 1, 1, keys.shape[1]))
    return cast(ops.logical_not(ops.equal(rows, columns)), popxl.float32) * MASK_VALUE
