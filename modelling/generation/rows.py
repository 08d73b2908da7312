"""Rows of a batch, for generation: several sequences for each prompt."""

from __future__ import annotations

import numpy as np

import popxl
from popxl import Tensor, ops


def repeated(t: Tensor, times: int) -> Tensor:
    """Each row of `t` so many times, one after the other: (batch, ...) -> (batch * times, ...)."""
    if times == 1:
        return t
    rows = np.repeat(np.arange(t.shape[0]), times)
    return ops.gather(t, popxl.constant(rows, popxl.int32, "repeated_rows"))
