"""Float8 scale of small mean squared error, computed on the device.

As `popxl.fp8_utils.host_fp8_mse_scale` does on the host.

Costs of the 63 scales differ by far less than float32 tells apart, so they are computed as
integers, digit by digit in base 4: a number of exponent e costs 4^e.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl import dtypes
from popxl._ir.op_registry import NoGrad, define
from popxl.fp8_utils import (
    EXPONENTS,
    log4_dropping_error,
    min_scaling_bias,
    representable_exponents,
)
from popxl.ops._emit import emit
from popxl.ops._numerics import check_floating
from popxl.tensor import Tensor, TensorSpec

_CARRIED = 16  # digits that carries of 31 bits may add


def _exponent_counts(x: Any) -> Any:
    """Counts the elements with each exponent of EXPONENTS, int32."""
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    exponents = (bits.reshape(-1) >> 23) - 127
    top = EXPONENTS[-1]
    finite = exponents < 128
    at = jnp.clip(exponents, None, top) - EXPONENTS[0]
    # What has no place, numbers too small and those that are none, is dropped.
    at = jnp.where(finite & (at >= 0), at, len(EXPONENTS))
    return jnp.zeros(len(EXPONENTS), jnp.int32).at[at].add(1, mode="drop")


def _base4_digits(terms: Any) -> Any:
    """Returns each row's number in base-4 digits, lowest first, from digits that can exceed 3."""

    def carry_digit(carry: Any, column: Any) -> Any:
        value = column + carry
        return value >> 2, value & 3

    _, digits = lax.scan(carry_digit, jnp.zeros(terms.shape[0], terms.dtype), terms.T)
    return digits


def _mse_scale(x: Any, dtype: dtypes.dtype) -> Any:
    check_floating(x)
    inside = jnp.asarray(representable_exponents(dtype))
    lost = log4_dropping_error(int(jnp.finfo(x.dtype).nmant), dtype)
    counts = _exponent_counts(x)
    padded_counts = jnp.pad(jnp.where(inside, counts, 0), ((0, 0), (0, lost + _CARRIED)))
    missed = jnp.pad(jnp.where(inside, 0, counts), ((0, 0), (lost, _CARRIED)))

    def keep_smallest(best: Any, digit: Any) -> Any:
        smallest = jnp.min(jnp.where(best, digit, 4))
        return best & (digit == smallest), None

    every = jnp.ones(len(inside), bool)
    best, _ = lax.scan(keep_smallest, every, _base4_digits(padded_counts + missed), reverse=True)
    middle = jnp.sum(best) // 2
    bias = jnp.argmax(jnp.cumsum(best) > middle) + min_scaling_bias
    return (-bias).astype(jnp.int32)


_DEF = define(
    "fp8_mse_scale",
    _mse_scale,
    infer=lambda spec, dtype: [TensorSpec((), dtypes.int32)],
    grad=NoGrad("integer output"),
)


def mse_scale(t: Tensor, dtype: dtypes.dtype) -> Tensor:
    """Returns the log2_scale for casting a tensor to float8 with small mean squared error.

    That of `popxl.fp8_utils.host_fp8_mse_scale`.

    Returns:
        int32 scalar in [-31, 31].

    Raises:
        ValueError: `dtype` is no float8 dtype.
    """
    representable_exponents(dtype)
    return emit(_DEF, [t], {"dtype": dtype})[0]
