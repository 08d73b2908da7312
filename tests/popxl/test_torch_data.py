"""Data of PyTorch's narrow types, bit for bit, and float64 data that is rounded once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import popxl
from popxl import fp8_utils

TYPES = {
    torch.bfloat16: popxl.bfloat16,
    torch.float16: popxl.float16,
    torch.float8_e4m3fn: popxl.float8_e4m3fn,
    torch.float8_e5m2: popxl.float8_e5m2,
    torch.float8_e4m3fnuz: popxl.float8_143,
    torch.float8_e5m2fnuz: popxl.float8_152,
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_data_of_narrow_types(ir, dtype, shape):
    data = torch.arange(1, 13).reshape(3, 4).T.T.to(dtype)
    data = data[0, 1] if shape == () else data[0, :0] if shape == (0,) else data
    variable = popxl.variable(data)
    assert variable.dtype is TYPES[dtype]
    assert variable.shape == shape
    mine = np.atleast_1d(variable._data).view(np.uint8)
    np.testing.assert_array_equal(
        mine.reshape(-1), torch.atleast_1d(data).contiguous().view(torch.uint8).reshape(-1).numpy()
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_written_data_of_a_narrow_type(ir, transposed):
    variable = popxl.variable(np.zeros((4, 3) if transposed else (3, 4)), popxl.bfloat16)
    data = torch.arange(12.0).reshape(3, 4).to(torch.bfloat16)
    data = data.T if transposed else data
    session = popxl.Session(ir)
    session.write_variable_data(variable, data)
    found = session.get_tensor_data(variable).astype(np.float32)
    np.testing.assert_array_equal(found, data.float().numpy())


# ---- rounding -----------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [popxl.float8_143, popxl.float8_152])
def test_float64_is_rounded_to_float8_once(dtype):
    values = np.arange(256, dtype=np.uint8).view(dtype.as_jax()).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    middle = (values[:-1] + values[1:]) / 2
    near = [middle * (1 - 2.0**-40), middle * (1 + 2.0**-40)]  # float32 lacks both
    for numbers, expected in zip(near, (values[:-1], values[1:]), strict=True):
        expected = np.where(middle < 0, _other(expected, values), expected)
        for scale in (0, 7, -7):
            found = fp8_utils.host_pow2scale_cast_to_fp8(numbers * 2.0**-scale, dtype, scale)
            np.testing.assert_array_equal(found.view(dtype.as_jax()).astype(np.float64), expected)


def _other(expected: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The other neighbour: below zero a factor above 1 makes a number smaller."""
    return values[1:] if expected[0] == values[0] else values[:-1]
