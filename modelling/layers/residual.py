"""The sum that leads around a layer."""

from __future__ import annotations

import numpy as np

import popxl
from popxl import Tensor, ops

FLOAT16_LIMIT = float(np.finfo(np.float16).max) - 1000


def add_residual(x: Tensor, y: Tensor) -> Tensor:
    """x + y, kept in the range of float16.

    Models trained in bfloat16, T5 before all, have a few activations beyond it. One infinity
    would make everything after it NaN; cut off, it does no harm (Hugging Face does the same).
    """
    total = x + y
    if total.dtype != popxl.float16:
        return total
    return ops.clip(total, -FLOAT16_LIMIT, FLOAT16_LIMIT)
