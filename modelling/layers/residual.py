"""Residual connections."""

from __future__ import annotations

import numpy as np

import popxl
from popxl import Tensor

FLOAT16_LIMIT = float(np.finfo(np.float16).max) - 1000


def add_residual(x: Tensor, y: Tensor) -> Tensor:
    """Returns x + y; in float16 clipped to that dtype's finite range.

    A few activations of models trained in bfloat16, especially T5, exceed that range. One infinity
    would turn everything after it into NaN; clipping does no harm (Hugging Face clips too). The
    gradient is not clipped, see `saturate`.
    """
    total = x + y
    if total.dtype != popxl.float16:
        return total
    from popxl_addons.ops import saturate

    return saturate(total, limit=FLOAT16_LIMIT)
