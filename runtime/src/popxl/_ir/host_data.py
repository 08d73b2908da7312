"""Conversion of host data (scalars, sequences, NumPy, PyTorch) to NumPy arrays."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from popxl import dtypes

INLINE_BYTES = 4096  # constants up to this size are written into the code of executables
_SHARED_CONSTANTS: WeakValueDictionary[Any, np.ndarray] = WeakValueDictionary()


def host_array(x: Any) -> np.ndarray:
    """Returns a scalar, sequence, array or PyTorch tensor as a NumPy array.

    Without a copy where possible.

    Raises:
        ValueError: an empty list, which has no dtype, or rows of different lengths.
    """
    if type(x).__module__.startswith("torch"):
        x = _from_torch(x.detach().cpu())
    try:
        array = np.asarray(x)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"host data must be an array: {error}") from None
    if not array.size and isinstance(x, (list, tuple)):
        raise ValueError("an empty list is no host data: pass a numpy array, which has a dtype")
    return array


def _from_torch(x: Any) -> np.ndarray:
    """Returns a PyTorch tensor as a NumPy array; bfloat16 and float8 by their bits."""
    import torch

    if not x.dtype.is_floating_point or x.dtype.itemsize > 2:
        return x.numpy()
    bits = x.view(torch.uint8 if x.dtype.itemsize == 1 else torch.int16)
    return bits.numpy().view(dtypes.dtype.as_dtype(x.dtype).as_numpy())


def round_to_odd(x: np.ndarray) -> np.ndarray:
    """Rounds float64 to float32 "to odd", so that a second rounding to a narrower type is exact."""
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    is_even = near.view(np.uint32) & 1 == 0
    neighbor = np.nextafter(near, np.where(x > near, np.float32(np.inf), np.float32(-np.inf)))
    return np.where((near != x) & is_even & ~np.isnan(x), neighbor, near)


def device_view(x: np.ndarray) -> np.ndarray:
    """Returns a host array viewed in the device's dtype (float8 is a record dtype on the host)."""
    return x.view(dtypes.dtype.as_dtype(x.dtype).as_jax()) if x.dtype.names else x


def deduplicate_constant(array: np.ndarray) -> np.ndarray:
    """Returns a copy of a constant's data; large equal constants share one read-only copy.

    A memory map is returned as it is.
    """
    if isinstance(array, np.memmap):
        return array
    if array.nbytes <= INLINE_BYTES:
        return array.copy()
    digest = hashlib.blake2b(array.reshape(-1).view(np.uint8).data).digest()
    key = array.dtype, array.shape, digest
    shared = _SHARED_CONSTANTS.get(key)
    if shared is None:
        shared = _SHARED_CONSTANTS[key] = array.copy()
        shared.flags.writeable = False
    return shared
