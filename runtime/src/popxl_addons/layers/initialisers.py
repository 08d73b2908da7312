"""Initial values of weights.

They come from numpy's global generator, so that `np.random.seed` makes a program repeatable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np


def normal(shape: Sequence[int], std: float = 0.02) -> Callable[[], np.ndarray]:
    """Draws from a normal distribution around 0."""
    return lambda: np.random.normal(0, std, tuple(shape))  # noqa: NPY002


def zeros(shape: Sequence[int]) -> Callable[[], np.ndarray]:
    """Zeros, all elements of which share one: gigabytes of state take no memory to describe."""
    return partial(np.broadcast_to, np.float32(0), tuple(shape))


def ones(shape: Sequence[int]) -> Callable[[], np.ndarray]:
    """Ones."""
    return partial(np.ones, tuple(shape), np.float32)
