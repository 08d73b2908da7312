"""What generation needs to know of right-padded prompts, and several sequences for each."""

from __future__ import annotations

import numpy as np

import popxl
from popxl import Tensor, ops


def last_tokens(input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The last word of each prompt.

    Args:
        input_ids: int32 (batch, length).
        mask: int32, the same shape, 1 where there is a word.

    Returns:
        The words, int32 (batch, 1); their positions, int32 (batch,); and whether there is one at
        all, bool (batch,): of samples without a prompt, the position is 0.
    """
    batch, length = input_ids.shape
    count, zero = ops.sum(mask, 1), popxl.constant(0, popxl.int32)
    last = ops.maximum(count - 1, zero)
    starts = popxl.constant(np.arange(batch) * length, popxl.int32, "row_starts")
    last_tokens = ops.gather(input_ids.reshape((batch * length,)), starts + last)
    return last_tokens.reshape((batch, 1)), last, ops.greater(count, zero)


def left_padded(input_ids: Tensor, mask: Tensor) -> Tensor:
    """The prompts with -1 in front of them as padding: int32 (batch, length); see `last_tokens`.

    So the last word of each is in the last column, where what is written goes on.
    """
    batch, length = input_ids.shape
    padding = length - ops.sum(mask, 1).reshape((batch, 1))
    columns = popxl.constant(np.arange(length)[None], popxl.int32, "columns")
    starts = popxl.constant(np.arange(batch)[:, None] * length, popxl.int32, "row_starts")
    zero, nothing = (popxl.constant(x, popxl.int32) for x in (0, -1))
    at = starts + ops.maximum(columns - padding, zero)
    shifted = ops.gather(input_ids.reshape((batch * length,)), at)
    return ops.where(ops.greater(padding, columns), nothing, shifted)


def repeat_interleave(t: Tensor, times: int) -> Tensor:
    """Each row of `t` so many times, one after the other: (batch, ...) -> (batch * times, ...)."""
    if times == 1:
        return t
    rows = np.repeat(np.arange(t.shape[0]), times)
    return ops.gather(t, popxl.constant(rows, popxl.int32, "repeated_rows"))
