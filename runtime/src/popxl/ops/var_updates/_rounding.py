"""Stochastic rounding of float32 updates to 16-bit variables.

To one of the two neighbouring values of a 16-bit dtype, to each with a probability proportional to
the distance from the other, so that the expected result is the value itself (Gupta et al., 2015,
arXiv:1502.02551). Replicas that hold a variable alike round it alike.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax


def round_stochastically(new_value: Any, t: Any, seed: Any, update_number: Any) -> Any:
    """Rounds a float32 update of a variable with old value `t` (see `_store.round_to_variable`)."""
    # Replicas draw the same bits, so that copies of a variable stay equal. Shards and slices of one
    # should not round in step, though: their old values, equal in copies alone, tell them apart.
    old_bits = lax.bitcast_convert_type(t, jnp.uint16)
    return round_to_neighbor(new_value, t.dtype, random_uint16(seed, old_bits, update_number))


def random_uint16(seed: Any, old_bits: Any, update_number: Any) -> Any:
    """Returns uniform random uint16 of the shape of `old_bits`, for one update of a run.

    A hash of each element's position, and of `old_bits`, under a key that Threefry draws: it is
    computed where the update is, element by element. Drawn by Threefry, the bits of a large table
    would be in memory for a while, and so would be the state that XLA's kernels draw them from.
    """
    from popxl.ops.random import random_bits

    first, second = random_bits(seed, (2,), update_number)
    position = lax.iota(jnp.uint32, old_bits.size).reshape(old_bits.shape)
    mixed = _mix_bits(_mix_bits(position ^ first) ^ second ^ old_bits.astype(jnp.uint32))
    return (mixed >> 16).astype(jnp.uint16)


def _mix_bits(x: Any) -> Any:
    """Hashes uint32 so that each output bit depends on all input bits.

    The constants are those of C. Wellons' search for such functions
    (nullprogram.com/blog/2018/07/31).
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def round_to_neighbor(value: Any, dtype: Any, bits: Any) -> Any:
    """Rounds float32 up or down to a neighbor in a 16-bit float dtype, chosen by random bits.

    A value of the dtype remains. NaN does too, and where there is no finite neighbour above, the
    result is that of rounding to nearest.

    Args:
        bits: evenly distributed uint16 of the shape of `value`. Probabilities are exact, but among
            the subnormal numbers of float16, where they are multiples of 2^-16.
    """
    info = jnp.finfo(dtype)
    dropped = 23 - info.nmant  # low bits of the float32 that the dtype does not have
    pattern = lax.bitcast_convert_type(value, jnp.uint32)
    # A random number below one step of the dtype is added to the magnitude, the rest is cut off.
    pattern = pattern + (bits.astype(jnp.uint32) >> (16 - dropped))
    kept = jnp.uint32(2**32 - 2**dropped)
    rounded = lax.bitcast_convert_type(pattern & kept, jnp.float32)
    if info.minexp > jnp.finfo(jnp.float32).minexp:  # its subnormal numbers are further apart
        rounded = jnp.where(
            jnp.abs(value) < float(info.smallest_normal),
            _round_subnormal(value, info, bits),
            rounded,
        )
    inside = jnp.abs(value) <= float(info.max)
    return jnp.where(inside, rounded, value).astype(dtype)


def _round_subnormal(value: Any, info: Any, bits: Any) -> Any:
    """Rounds stochastically in a dtype's subnormal range, where values have a constant step."""
    step = float(info.smallest_subnormal)
    steps = jnp.abs(value) / step  # exact: the step is a power of two
    whole = jnp.floor(steps)
    unit = bits.astype(jnp.float32) * 2.0**-16  # in [0, 1)
    return jnp.copysign((whole + (unit < steps - whole)) * step, value)
