"""The scale for float8 that uses all of its range."""

from __future__ import annotations

import popxl
from popxl import dtypes, ops
from popxl.fp8_utils import max_scaling_bias, min_scaling_bias
from popxl_addons.ops.fp8_utils import fp8_def

__all__ = ["fp8_amax_scale"]


def fp8_amax_scale(src: popxl.Tensor, dtype: dtypes.dtype = dtypes.float8_143) -> popxl.Tensor:
    """The largest log2_scale for `ops.pow2scale_cast_to_fp8` at which nothing overflows.

    Args:
        src: what will be cast.
        dtype: `popxl.float8_143` or `popxl.float8_152`.

    Returns:
        int32 scalar in [-31, 31]: floor(log2(largest / max(abs(src)))).
    """
    wide = src if src.dtype == popxl.float32 else ops.cast(src, popxl.float32)
    # The smallest float32 stands for zeros, which fit with any scale.
    tiny = popxl.constant(2.0**-126, popxl.float32)
    largest = ops.maximum(ops.max(ops.abs(wide)), tiny)
    scale = ops.floor(ops.log2(fp8_def(dtype).max_value / largest))
    return ops.cast(ops.clip(scale, min_scaling_bias, max_scaling_bias), popxl.int32)
