"""The residual connection around a layer."""

from __future__ import annotations

import numpy as np

import popxl
from popxl import Tensor
from popxl_addons.ops import saturate

FLOAT16_LIMIT = float(np.finfo(np.float16).max) - 1000


def add_residual(x: Tensor, y: Tensor) -> Tensor:
    """x + y, kept in the range of float16.

    Models trained in bfloat16, T5 above all, have a few activations beyond it. One infinity would
    turn everything after it into NaN; clipped, it does no harm (Hugging Face does the same). The
    gradient passes through, for which see `saturate`.
    """
    total = x + y
    if total.dtype != popxl.float16:
        return total
    return saturate(total, limit=FLOAT16_LIMIT)
