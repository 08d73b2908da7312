"""The scale for float8 with the least mean squared error."""

from __future__ import annotations

import popxl
from popxl import dtypes, ops
from popxl.fp8_utils import max_scaling_bias, min_scaling_bias
from popxl_addons.ops.fp8_amax_scale import fp8_amax_scale
from popxl_addons.ops.fp8_utils import fp8_def

__all__ = ["fp8_mse_scale", "max_scaling_bias", "min_scaling_bias"]

_CANDIDATES = range(8, -9, -1)  # around the scale at which nothing overflows; larger ones first


def fp8_mse_scale(src: popxl.Tensor, dtype: dtypes.dtype = dtypes.float8_143) -> popxl.Tensor:
    """The log2_scale with which casting `src` to float8 and back has the least squared error.

    As `popxl.fp8_utils.host_fp8_mse_scale`, on the device: scales from 8 below to 8 above the one
    at which nothing overflows are tried; what overflows counts as the largest finite value; of
    equal scales the largest wins.

    Args:
        src: what will be cast.
        dtype: `popxl.float8_143` or `popxl.float8_152`.

    Returns:
        int32 scalar in [-31, 31].
    """
    wide = src if src.dtype == popxl.float32 else ops.cast(src, popxl.float32)
    fitting = ops.cast(fp8_amax_scale(wide, dtype), popxl.float32)
    scales = [ops.clip(fitting + float(d), min_scaling_bias, max_scaling_bias) for d in _CANDIDATES]
    errors = ops.concat([_error(wide, scale, dtype).reshape((1,)) for scale in scales])
    tried = ops.concat([scale.reshape((1,)) for scale in scales])
    best = ops.gather(tried, ops.cast(ops.argmin(errors), popxl.int32))
    return ops.cast(best.reshape(()), popxl.int32)


def _error(t: popxl.Tensor, scale: popxl.Tensor, dtype: dtypes.dtype) -> popxl.Tensor:
    """Mean squared error of casting `t` with this scale, a float32 scalar."""
    factor = ops.pow(popxl.constant(2.0, popxl.float32), scale)
    limit = fp8_def(dtype).max_value
    zero = popxl.constant(0, popxl.int32)
    stored = ops.pow2scale_cast_to_fp8(ops.clip(t * factor, -limit, limit), zero, dtype)
    back = ops.pow2scale_cast_from_fp8(stored, zero, popxl.float32) / factor
    difference = back - t
    return ops.mean(difference * difference)
