"""Conversion of host data to NumPy, and small public helpers of PopXL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from popxl import dtypes
from popxl._ir.host_data import host_array
from popxl.typing_ import HostScalarTensor

HW_DEVICE_CONNECTION_TIMEOUT = int(1e4)

downcast_np_dtypes = {
    np.dtype("int64"): np.dtype("int32"),
    np.dtype("uint64"): np.dtype("uint32"),
    np.dtype("float64"): np.dtype("float32"),
}


def to_numpy(
    x: HostScalarTensor,
    dtype: dtypes.dtype | None = None,
    downcast: bool = True,
    copy: bool = True,
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> np.ndarray:
    """Converts host data (scalar, sequence, numpy array, torch tensor) to a C-ordered array.

    Args:
        dtype: element type of the result; default: that of the data.
        downcast: without `dtype`, turn 64-bit data into 32-bit data.
        copy: always copy; without it the result may share memory with `x`.
        log2_scale: for a float8 `dtype`: store x * 2**log2_scale. Default 0.
        nan_on_overflow: for a float8 `dtype`: values out of range become NaN instead of the
            largest finite value. Default True.

    Raises:
        ValueError: float8 options without a float8 dtype, data that is no array, or a number that
            the whole numbers of the result's dtype do not reach.
    """
    dtype = None if dtype is None else dtypes.dtype.as_dtype(dtype)
    if isinstance(x, np.memmap) and (dtype is None or x.dtype == dtype.as_numpy()):
        return x  # a memory map is the user's storage: it is shared, never copied
    array = host_array(x)
    check_numeric_data(array, x, dtype)
    is_float8 = dtype in (dtypes.float8_143, dtypes.float8_152)
    if not is_float8 and (log2_scale is not None or nan_on_overflow is not None):
        raise ValueError("log2_scale and nan_on_overflow need a float8 dtype")
    if dtype is None:
        target = downcast_np_dtypes.get(array.dtype, array.dtype) if downcast else array.dtype
    else:
        target = dtype.as_numpy()
    if is_float8 and array.dtype != target:
        from popxl import fp8_utils

        nan = True if nan_on_overflow is None else nan_on_overflow
        numbers = array if array.dtype.kind == "f" else array.astype(np.float32)
        return fp8_utils.host_pow2scale_cast_to_fp8(numbers, dtype, log2_scale or 0, nan)
    check_range(array, target)
    if (copy or not array.flags.c_contiguous) and array.nbytes and is_broadcast_zero(array):
        return np.zeros(array.shape, target)  # takes memory when it is written, not before
    return np.array(array, dtype=target, copy=copy or None, order="C")


def check_numeric_data(array: np.ndarray, x: Any, dtype: dtypes.dtype | None) -> None:
    """Raises ValueError for non-numeric data, and for numbers that a dtype would truncate.

    Such as the bits of float8 records, or the real part of complex numbers.
    """
    is_number = array.dtype.kind in "biufc" or array.dtype.isbuiltin == 2  # those of ml_dtypes
    if not is_number and array.dtype not in dtypes._NP_TO_POPXL:
        raise ValueError(
            f"cannot make an array of {type(x).__name__} data of type {array.dtype}: pass arrays, "
            "sequences, or numbers of at most 64 bits"
        )
    if dtype is None or array.dtype == dtype.as_numpy():
        return
    if array.dtype.names:
        name = array.dtype.names[0]
        raise ValueError(
            f"{name} data are bits, not numbers of {dtype.name}: use "
            "popxl.fp8_utils.host_pow2scale_cast_from_fp8 first"
        )
    if array.dtype.kind == "c" and not dtype.is_complex:
        raise ValueError(f"{array.dtype} data are no numbers of {dtype.name}: take a part of them")


def check_range(array: np.ndarray, target: np.dtype) -> None:
    """Raises ValueError for numbers that an integer dtype `target` would wrap around.

    Fractions are cut off.
    """
    if target.kind not in "iu" or not array.size or np.can_cast(array.dtype, target):
        return
    limits = np.iinfo(target)
    for number in (array.min(), array.max()):
        if not np.isfinite(number) or not limits.min <= int(number) <= limits.max:
            raise ValueError(
                f"{number} does not fit {target}, which holds {limits.min} to {limits.max}: choose "
                "another number or dtype"
            )


def is_broadcast_zero(array: np.ndarray) -> bool:
    """True if all elements of an array share one zero in memory, as in an unwritten variable."""
    return array.size > 1 and not any(array.strides) and not array.flat[0]


def table_to_string(
    rows: Sequence[Sequence[Any]], delimiter: str = " | ", header: bool = True
) -> str:
    """Formats rows as a text table with aligned columns; the first row can be a header."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))] if cells else []
    lines = [delimiter.join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    if header and lines:
        lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)
