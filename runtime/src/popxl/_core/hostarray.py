"""Data of the host as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np


def host_array(x: Any) -> np.ndarray:
    """A scalar, sequence, array or tensor of PyTorch as an array, in its own memory if it has any.

    Raises:
        ValueError: an empty list, which has no dtype.
    """
    if type(x).__module__.startswith("torch"):
        x = x.detach().cpu().numpy()
    array = np.asarray(x)
    if not array.size and isinstance(x, (list, tuple)):
        raise ValueError("an empty list is no host data: pass a numpy array, which has a dtype")
    return array
