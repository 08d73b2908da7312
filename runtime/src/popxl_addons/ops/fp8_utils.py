"""The number formats of float8 arithmetic (Noune et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass

from popxl import dtypes


@dataclass(frozen=True)
class FpDef:
    """A floating-point format.

    Attributes:
        exponent_size, mantissa_size: bits of each.
        exponent_bias: what is subtracted from the stored exponent.
        has_denorms: whether there are denormal numbers.
        has_infs: whether the largest exponent is kept for infinities and NaNs.
        max_value: largest finite number.
        max_exponent, min_exponent: of the largest and the smallest positive number.
    """

    exponent_size: int
    mantissa_size: int
    exponent_bias: int
    has_denorms: bool
    has_infs: bool
    max_value: float
    max_exponent: int
    min_exponent: int


ieee_fp32_no_denorms = FpDef(8, 23, 127, False, True, 3.4028235e38, 127, -126)
ieee_fp16_denorms = FpDef(5, 10, 15, True, True, 65504, 15, -14)
float8_152_def = FpDef(5, 2, 16, True, False, 57344, 15, -17)
float8_143_def = FpDef(4, 3, 8, True, False, 240, 7, -10)


def fp8_def(dtype: dtypes.dtype) -> FpDef:
    """The format of a float8 dtype. Raises ValueError for other dtypes."""
    formats = {dtypes.float8_143: float8_143_def, dtypes.float8_152: float8_152_def}
    if dtype not in formats:
        raise ValueError(f"{dtype!r} is no float8 dtype: use popxl.float8_143 or float8_152")
    return formats[dtype]
