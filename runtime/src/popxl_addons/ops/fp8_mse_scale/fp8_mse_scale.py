"""Float8 scale with a small mean squared error."""

from __future__ import annotations

import popxl
from popxl import dtypes
from popxl.fp8_utils import max_scaling_bias, min_scaling_bias
from popxl.ops._mse_scale import mse_scale

__all__ = ["fp8_mse_scale", "max_scaling_bias", "min_scaling_bias"]


def fp8_mse_scale(src: popxl.Tensor, dtype: dtypes.dtype = dtypes.float8_143) -> popxl.Tensor:
    """Compute on the device the log2_scale that `host_fp8_mse_scale` finds on the host.

    Args:
        src: what will be cast.
        dtype: `popxl.float8_143` or `popxl.float8_152`.

    Returns:
        int32 scalar in [-31, 31].
    """
    return mse_scale(src, dtype)
