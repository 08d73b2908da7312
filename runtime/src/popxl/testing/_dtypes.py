"""Lists of dtypes to parametrize tests with."""

from __future__ import annotations

from popxl import dtypes

__all__ = ["get_all_dtypes", "get_all_int_dtypes"]

_SIGNED = (dtypes.int8, dtypes.int16, dtypes.int32, dtypes.int64)
_UNSIGNED = (dtypes.uint8, dtypes.uint16, dtypes.uint32, dtypes.uint64)
_OTHERS = (
    dtypes.bool,
    dtypes.float8_143,
    dtypes.float8_152,
    dtypes.float16,
    dtypes.float32,
    dtypes.float64,
    dtypes.complex64,
    dtypes.complex128,
)


def get_all_dtypes() -> list[dtypes.dtype]:
    """Returns all dtypes of PopXL."""
    return [*_OTHERS, *get_all_int_dtypes()]


def get_all_int_dtypes(
    include_signed: bool = True, include_unsigned: bool = True
) -> list[dtypes.dtype]:
    """Returns the integer dtypes: signed ones, unsigned ones, or both."""
    return [*(_SIGNED if include_signed else ()), *(_UNSIGNED if include_unsigned else ())]
