"""Float8 on the host: conversion of numpy arrays, and the choice of a scale.

The formats are those of Noune et al. (2022), "8-bit numerical formats for deep neural networks":
exponent bias 8 and 16, no infinities, and 0x80 for NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from popxl import dtypes

max_scaling_bias = 31
min_scaling_bias = -31


@dataclass(frozen=True)
class FpDef:
    """A floating-point format.

    Attributes:
        exponent_size, mantissa_size: bits of each.
        exponent_bias: what is subtracted from the stored exponent.
        has_denorms: whether there are denormal numbers.
        has_infs: whether the largest exponent is kept for infinities and NaNs.
    """

    exponent_size: int
    mantissa_size: int
    exponent_bias: int
    has_denorms: bool
    has_infs: bool


ieee_fp32_no_denorms = FpDef(8, 23, 127, False, True)
ieee_fp16_denorms = FpDef(5, 10, 15, True, True)
float8_152_def = FpDef(5, 2, 16, True, False)
float8_143_def = FpDef(4, 3, 8, True, False)

_FLOAT8 = {dtypes.float8_143: float8_143_def, dtypes.float8_152: float8_152_def}


def find_exponential_range(fp_def: FpDef) -> tuple[int, int]:
    """Exponents of the smallest and the largest finite number: 2^low <= |x| < 2^(high + 1)."""
    lowest = 1 - fp_def.exponent_bias - (fp_def.mantissa_size if fp_def.has_denorms else 0)
    highest = 2**fp_def.exponent_size - 1 - fp_def.exponent_bias - fp_def.has_infs
    return lowest, highest


def _largest(dtype: dtypes.dtype) -> float:
    fp_def = _FLOAT8[dtype]
    return (2 - 2.0**-fp_def.mantissa_size) * 2.0 ** find_exponential_range(fp_def)[1]


def _check(dtype: dtypes.dtype | None, log2_scale: int = 0) -> dtypes.dtype:
    found = dtypes.float8_143 if dtype is None else dtype
    if found not in _FLOAT8:
        raise ValueError(f"{found!r} is no float8 dtype: use popxl.float8_143 or float8_152")
    if not -32 <= log2_scale < 32:
        raise ValueError(f"log2_scale must be in [-32, 32), but is {log2_scale}")
    return found


# ---- conversion ---------------------------------------------------------------------------------
def host_pow2scale_cast_to_fp8(
    src: np.ndarray,
    dtype: dtypes.dtype | None = None,
    log2_scale: int = 0,
    nan_on_overflow: bool = True,
) -> np.ndarray:
    """Round src * 2^log2_scale to float8, to nearest even.

    Args:
        src: float data.
        dtype: `popxl.float8_143` (default) or `popxl.float8_152`.
        log2_scale: in [-32, 32).
        nan_on_overflow: values out of range become NaN; otherwise the largest finite value.

    Returns:
        Array of the structured dtype of one byte that stands for float8 on the host.

    Raises:
        ValueError: no float8 dtype, or a scale out of range.
    """
    dtype = _check(dtype, log2_scale)
    scaled = np.ldexp(np.asarray(src, np.float32), int(log2_scale))
    if not nan_on_overflow:
        scaled = np.clip(scaled, -_largest(dtype), _largest(dtype))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(scaled).astype(dtype.as_jax()).view(dtype.as_numpy())


def host_pow2scale_cast_from_fp8(
    src: np.ndarray, dtype: dtypes.dtype | None = None, log2_scale: int = 0
) -> np.ndarray:
    """src * 2^log2_scale; negate the scale with which `src` was made to get the values back.

    Args:
        src: float8 data in the host's structured dtype.
        dtype: dtype of the result; default float32.
        log2_scale: in [-32, 32).

    Raises:
        ValueError: `src` is not float8, or the scale is out of range.
    """
    source = _check(dtypes.dtype.as_dtype(src.dtype), log2_scale)
    values = src.view(source.as_jax()).astype(np.float32)
    target = dtypes.float32 if dtype is None else dtype
    return np.ldexp(values, int(log2_scale)).astype(target.as_numpy())


# ---- choice of a scale --------------------------------------------------------------------------
def host_fp8_mse_scale(src: np.ndarray, dtype: dtypes.dtype | None = None) -> int:
    """The log2_scale with which casting `src` to float8 has the least mean squared error.

    Every scale of [-31, 31] is tried whose error can be the least: fewer leave more headroom than
    the format has digits, more let the largest value overflow by over half of them. Of equal ones
    the largest counts. The result is for `host_pow2scale_cast_to_fp8`; values that overflow count
    as the largest finite one.

    Args:
        dtype: `popxl.float8_143` (default) or `popxl.float8_152`.
    """
    dtype = _check(dtype)
    values = np.asarray(src, np.float32).ravel()
    values = values[np.isfinite(values)]
    amax = float(np.abs(values).max(initial=0.0))
    if amax == 0:
        return 0
    fitting = int(np.floor(np.log2(_largest(dtype) / amax)))
    low, high = (int(np.clip(fitting + d, min_scaling_bias, max_scaling_bias)) for d in (-8, 8))
    errors = {scale: _error(values, dtype, scale) for scale in range(high, low - 1, -1)}
    return min(errors, key=errors.__getitem__)


def _error(values: np.ndarray, dtype: dtypes.dtype, scale: int) -> float:
    quantised: Any = host_pow2scale_cast_to_fp8(values, dtype, scale, nan_on_overflow=False)
    difference = host_pow2scale_cast_from_fp8(quantised, dtypes.float32, -scale) - values
    return float(np.mean(np.square(difference, dtype=np.float64)))


host_fp8_mse_scale_pb = host_fp8_mse_scale
