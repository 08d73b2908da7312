"""Float8 number formats (Noune et al., 2022)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from popxl import dtypes, fp8_utils


@dataclass(frozen=True)
class FpDef(fp8_utils.FpDef):
    """A floating-point number format with its largest value and its exponents' limits.

    Attributes:
        max_value: largest finite number.
        max_exponent, min_exponent: of the largest and the smallest positive number.
    """

    max_value: float
    max_exponent: int
    min_exponent: int


def _with_limits(
    format: fp8_utils.FpDef, max_value: float, max_exponent: int, min_exponent: int
) -> FpDef:
    return FpDef(**asdict(format), max_value=max_value, max_exponent=max_exponent,
                 min_exponent=min_exponent)  # fmt: skip


ieee_fp32_no_denorms = _with_limits(fp8_utils.ieee_fp32_no_denorms, 3.4028235e38, 127, -126)
ieee_fp16_denorms = _with_limits(fp8_utils.ieee_fp16_denorms, 65504, 15, -14)
float8_152_def = _with_limits(fp8_utils.float8_152_def, 57344, 15, -17)
float8_143_def = _with_limits(fp8_utils.float8_143_def, 240, 7, -10)


def fp8_def(dtype: dtypes.dtype) -> FpDef:
    """Return the number format of a float8 dtype; raises ValueError for other dtypes."""
    formats = {dtypes.float8_143: float8_143_def, dtypes.float8_152: float8_152_def}
    if dtype not in formats:
        raise ValueError(f"{dtype!r} is no float8 dtype: use popxl.float8_143 or float8_152")
    return formats[dtype]
