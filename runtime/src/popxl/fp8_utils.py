"""Float8 on the host: conversion of NumPy arrays, and the choice of a scale.

The formats are those of Noune et al. (2022), "8-bit numerical formats for deep neural networks":
exponent bias 8 and 16, no infinities, and 0x80 for NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from popxl import dtypes
from popxl._ir.host_data import host_array, round_to_odd

max_scaling_bias = 31
min_scaling_bias = -31


@dataclass(frozen=True)
class FpDef:
    """Exponent bits, mantissa bits and bias of a floating-point format.

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

_WIDE = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))
_FLOAT8 = {dtypes.float8_143: float8_143_def, dtypes.float8_152: float8_152_def}


def find_exponential_range(fp_def: FpDef) -> tuple[int, int]:
    """Returns the exponents of the smallest and largest finite x: 2^low <= |x| < 2^(high + 1)."""
    lowest = 1 - fp_def.exponent_bias - (fp_def.mantissa_size if fp_def.has_denorms else 0)
    highest = 2**fp_def.exponent_size - 1 - fp_def.exponent_bias - fp_def.has_infs
    return lowest, highest


def _check_arguments(
    dtype: dtypes.dtype | None, log2_scale: int = 0, error: type[Exception] = ValueError
) -> dtypes.dtype:
    float8 = dtypes.float8_143 if dtype is None else dtype
    if float8 not in _FLOAT8:
        raise error(f"{float8!r} is no float8 dtype: use popxl.float8_143 or float8_152")
    if not -32 <= log2_scale < 32:
        raise ValueError(f"log2_scale must be in [-32, 32), but is {log2_scale}")
    return float8


# ---- conversion ---------------------------------------------------------------------------------
def host_pow2scale_cast_to_fp8(
    src: np.ndarray,
    dtype: dtypes.dtype | None = None,
    log2_scale: int = 0,
    nan_on_overflow: bool = True,
) -> np.ndarray:
    """Rounds src * 2^log2_scale to float8, to nearest even.

    Args:
        src: float16, float32 or float64 data: an array, a tensor of PyTorch, or a list.
        dtype: `popxl.float8_143` (default) or `popxl.float8_152`.
        log2_scale: in [-32, 32).
        nan_on_overflow: values out of range become NaN; otherwise the largest finite value.
            Infinity always becomes NaN.

    Returns:
        Array of the structured dtype of one byte that stands for float8 on the host.

    Raises:
        RuntimeError: no float8 dtype, or data of another type.
        ValueError: a scale out of range.
    """
    dtype = _check_arguments(dtype, log2_scale, RuntimeError)
    data = np.asarray(host_array(src), order="C")
    if data.dtype not in _WIDE:
        raise RuntimeError(f"float16, float32 and float64 data become float8, not {data.dtype}")
    with np.errstate(invalid="ignore", over="ignore"):
        finite = np.isfinite(data)
        is_wide = data.dtype == np.float64
        scaled = np.ldexp(data if is_wide else data.astype(np.float32), int(log2_scale))
        scaled = round_to_odd(scaled) if is_wide else scaled
        if not nan_on_overflow:
            cut = np.clip(scaled, -dtype.largest, dtype.largest)
            scaled = np.where(finite, cut, np.float32(np.nan))
        return np.asarray(scaled).astype(dtype.as_jax()).view(dtype.as_numpy())


def host_pow2scale_cast_from_fp8(
    src: np.ndarray, dtype: dtypes.dtype | None = None, log2_scale: int = 0
) -> np.ndarray:
    """Returns src * 2^log2_scale; to undo a cast to float8, negate its scale.

    Args:
        src: float8 data in the host's structured dtype.
        dtype: dtype of the result: float16, float32 or float64.
        log2_scale: in [-32, 32).

    Raises:
        RuntimeError: `src` is not float8, or `dtype` is another one or not given.
        ValueError: the scale is out of range.
    """
    if dtype is None or dtype.as_numpy() not in _WIDE:
        raise RuntimeError(f"float8 becomes float16, float32 or float64, not {dtype!r}")
    data = np.asarray(src)
    source = next((t for t in _FLOAT8 if t.as_numpy() == data.dtype), None)
    if source is None:
        raise RuntimeError(f"the data to cast from must be float8, but is {data.dtype}")
    values = data.view(_check_arguments(source, log2_scale).as_jax()).astype(np.float32)
    return np.ldexp(values, int(log2_scale)).astype(dtype.as_numpy())


# ---- choice of a scale --------------------------------------------------------------------------
_SPANS = {dtypes.float8_143: (-10, 18), dtypes.float8_152: (-17, 33)}  # lowest exponent, how many
_MANTISSAS = {np.dtype(np.float32): 23, np.dtype(np.float16): 10}
EXPONENTS = range(-126, 127)
"""Exponents that are told apart; smaller numbers cost nothing."""


def representable_exponents(dtype: dtypes.dtype) -> np.ndarray:
    """Returns which exponents float8 represents at each bias -31, ..., 31: bool (63, 253).

    Raises:
        ValueError: `dtype` is no float8 dtype.
    """
    low, span = _SPANS[_check_arguments(dtype)]
    lowest = low + np.arange(min_scaling_bias, max_scaling_bias + 1)[:, None]
    exponents = np.array(EXPONENTS)
    return (exponents >= lowest) & (exponents < lowest + span)


def log4_dropping_error(mantissa: int, dtype: dtypes.dtype) -> int:
    """Returns log4 of the squared error of dropping a number over that of rounding it."""
    return mantissa - _FLOAT8[_check_arguments(dtype)].mantissa_size


def host_fp8_mse_scale(src: np.ndarray, dtype: dtypes.dtype | None = None) -> tuple[float, int]:
    """Returns the least estimated mean squared error of casting to float8, and its scale.

    It is an estimate from a histogram of the exponents. A number of exponent e that float8 has with
    a scale costs 4^e times 4^-(bits that rounding takes from the mantissa); others cost 4^e, be
    they too small or too large.

    Args:
        src: float16 or float32 data.
        dtype: `popxl.float8_143` (default) or `popxl.float8_152`.

    Returns:
        The least cost, as a mean over the numbers, and the log2_scale in [-31, 31] that has it, for
        `host_pow2scale_cast_to_fp8`; of several the middle one.

    Raises:
        RuntimeError: `src` is of another type.
        ValueError: `dtype` is no float8 dtype.
    """
    dtype = _check_arguments(dtype)
    array = np.asarray(src)
    if array.dtype not in _MANTISSAS:
        raise RuntimeError(f"a scale is found for float16 and float32 data, not {array.dtype}")
    lost = log4_dropping_error(_MANTISSAS[array.dtype], dtype)
    counts = _exponent_counts(array)
    # Python's integers hold the costs exactly, in units of 4^(-126 - lost).
    powers = [count << 2 * i for i, count in enumerate(counts)]
    everything = sum(powers) << 2 * lost
    costs = []
    for inside in representable_exponents(dtype):
        kept = sum(p for p, has in zip(powers, inside, strict=True) if has)
        costs.append(everything - (kept << 2 * lost) + kept)
    least = min(costs)
    best = [i for i, cost in enumerate(costs) if cost == least]
    unit = max(array.size, 1) << 2 * (lost - EXPONENTS[0])
    return least / unit, -(min_scaling_bias + best[len(best) // 2])


def _exponent_counts(values: np.ndarray) -> list[int]:
    """Returns the number of elements with each exponent of EXPONENTS; the last takes all larger."""
    sizes = np.abs(values.ravel().astype(np.float64))
    _, exponents = np.frexp(sizes[np.isfinite(sizes) & (sizes > 0)])
    places = np.minimum(exponents - 1, EXPONENTS[-1]) - EXPONENTS[0]
    return np.bincount(places[places >= 0], minlength=len(EXPONENTS)).tolist()


def host_fp8_mse_scale_pb(src: np.ndarray, dtype: dtypes.dtype | None = None) -> int:
    """Returns the scale of `host_fp8_mse_scale` alone.

    Raises:
        RuntimeError: as there, or `dtype` is not given.
        ValueError: `dtype` is no float8 dtype.
    """
    if dtype is None:
        raise RuntimeError("a scale is for one dtype: pass popxl.float8_143 or popxl.float8_152")
    return host_fp8_mse_scale(src, dtype)[1]
