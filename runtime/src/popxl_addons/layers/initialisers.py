"""Initial values of weights, as NumPy arrays.

They come from numpy's global generator, so that `np.random.seed` makes a program repeatable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from popxl_addons.variable_factory import zeros as zeros


def normal(shape: Sequence[int], std: float = 0.02) -> Callable[[], np.ndarray]:
    """Return a function that draws an array from a normal distribution with mean 0."""
    return lambda: np.random.normal(0, std, tuple(shape))  # noqa: NPY002


def ones(shape: Sequence[int]) -> Callable[[], np.ndarray]:
    """Return a function that makes a float32 array of ones."""
    return partial(np.ones, tuple(shape), np.float32)
