"""Host arrays become device arrays that own their memory, wherever the host array lies."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from popxl._devices.mesh import create_per_replica_sharding, replica_mesh
from popxl._storage import replica_arrays


def _at(offset: int, size: int, dtype) -> np.ndarray:
    """An array of ones that lies `offset` bytes behind a multiple of 64."""
    nbytes = size * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    out = memory[start : start + nbytes].view(dtype)
    out[...] = 1
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, ml_dtypes.bfloat16])
@pytest.mark.parametrize("offset", [0, 16])
def test_put_never_shares_memory(offset, dtype):
    x = _at(offset, 1 << 12, dtype)
    array = replica_arrays.put_array(x, create_per_replica_sharding(replica_mesh("cpu", 1)))
    assert array.unsafe_buffer_pointer() != x.ctypes.data
    x[...] = 2
    assert np.unique(np.asarray(array)).tolist() == [1]


@pytest.mark.parametrize(
    "x", [np.zeros((0, 3)), np.arange(12.0).reshape(3, 4).T, np.broadcast_to(3.0, (2, 5))]
)
def test_put_takes_empty_strided_and_repeated_arrays(x):
    x = x.astype(np.float32, copy=False)
    array = replica_arrays.put_array(x, create_per_replica_sharding(replica_mesh("cpu", 1)))
    np.testing.assert_array_equal(np.asarray(array), x)
