"""Float8 scale from the largest absolute value (amax) of a tensor."""

from __future__ import annotations

from typing import Any

import popxl
from popxl import dtypes
from popxl.custom import jax_op
from popxl.fp8_utils import max_scaling_bias, min_scaling_bias
from popxl.ops.fp8_e4m3_e5m2 import ScaleRule
from popxl_addons.ops.fp8_utils import fp8_def

__all__ = ["fp8_amax_scale"]


def fp8_amax_scale(src: popxl.Tensor, dtype: dtypes.dtype = dtypes.float8_143) -> popxl.Tensor:
    """Return the largest log2_scale at which casting `src` to float8 does not overflow.

    Args:
        src: what will be cast.
        dtype: `popxl.float8_143` or `popxl.float8_152`.

    Returns:
        int32 scalar in [-31, 31]: floor(log2(largest / max(abs(src)))).
    """
    largest = fp8_def(dtype).max_value
    return _log2_scale(src, largest=largest)


@jax_op(name="fp8_amax_scale", no_grad="scales are not differentiated")
def _log2_scale(t: Any, *, largest: float) -> Any:
    """Compute the log2 scale that maps the amax of `t` to at most `largest`: int32 scalar."""
    amax = abs(t.astype("float32")).max(initial=0.0)
    return ScaleRule.log2_scale(amax, largest).clip(min_scaling_bias, max_scaling_bias)
