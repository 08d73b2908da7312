"""Integer types, their extremes, and division as XLA does it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

import popxl

INTEGERS = [popxl.int8, popxl.int16, popxl.int32, popxl.uint8, popxl.uint16, popxl.uint32]


def quotient(x: int, y: int) -> int:
    """Towards zero."""
    return int(Fraction(x, y))


def extremes(dtype: popxl.dtype) -> list[int]:
    """The ends of a type, their neighbours and halves, and small numbers."""
    info = np.iinfo(dtype.as_numpy())
    near = {info.min, info.min + 1, info.min // 2, info.max // 2, info.max - 1, info.max}
    return sorted(near | {n for n in (-7, -3, -1, 0, 1, 3, 7) if info.min <= n})
