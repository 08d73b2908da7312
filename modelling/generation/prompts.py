"""Tensor functions on right-padded prompts: last tokens, left padding, repeated rows."""

from __future__ import annotations

import numpy as np

import popxl
from popxl import Tensor, ops


def last_tokens(input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the last token of each right-padded prompt: its id and its position.

    Args:
        input_ids: int32 (batch, length).
        mask: int32, same shape, 1 for tokens and 0 for padding.

    Returns:
        The last tokens, int32 (batch, 1); their positions, int32 (batch,), 0 without a prompt; and
        which samples have a prompt, bool (batch,).
    """
    batch, length = input_ids.shape
    count, zero = ops.sum(mask, 1), popxl.constant(0, popxl.int32)
    last = ops.maximum(count - 1, zero)
    starts = popxl.constant(np.arange(batch) * length, popxl.int32, "row_starts")
    tokens = ops.gather(input_ids.reshape((batch * length,)), starts + last)
    return tokens.reshape((batch, 1)), last, ops.greater(count, zero)


def pad_left(input_ids: Tensor, mask: Tensor) -> Tensor:
    """Pad right-padded prompts on the left with -1: int32 (batch, length) -> same shape.

    So the last token of each is in the last column, where the new tokens follow.

    Args:
        input_ids, mask: see `last_tokens`.
    """
    batch, length = input_ids.shape
    padding = length - ops.sum(mask, 1).reshape((batch, 1))
    columns = popxl.constant(np.arange(length)[None], popxl.int32, "columns")
    starts = popxl.constant(np.arange(batch)[:, None] * length, popxl.int32, "row_starts")
    zero, no_token = (popxl.constant(x, popxl.int32) for x in (0, -1))
    index = starts + ops.maximum(columns - padding, zero)
    shifted = ops.gather(input_ids.reshape((batch * length,)), index)
    return ops.where(ops.greater(padding, columns), no_token, shifted)


def repeat_interleave(t: Tensor, times: int) -> Tensor:
    """Repeat each row of `t`: (batch, ...) -> (batch * times, ...), copies next to each other."""
    if times == 1:
        return t
    rows = np.repeat(np.arange(t.shape[0]), times)
    return ops.gather(t, popxl.constant(rows, popxl.int32, "repeated_rows"))
