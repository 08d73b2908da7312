"""Data of the host as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from popxl import dtypes


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


def device_view(x: np.ndarray) -> np.ndarray:
    """Host data in the dtype that the device uses (float8 is a record on the host)."""
    return x.view(dtypes.dtype.as_dtype(x.dtype).as_jax()) if x.dtype.names else x
