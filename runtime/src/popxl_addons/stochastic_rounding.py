"""Stochastic rounding of float32 values to 16 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

import popxl
from popxl import ops
from popxl.custom import jax_op


def enable_stochastic_rounding(ir: popxl.Ir, enabled: bool = True) -> None:
    """Round 16-bit variables stochastically where `ops.var_updates` update them.

    The updates compute in float32. Their result is rounded to one of the two neighbouring values
    of the variable's type, to each with a probability proportional to the distance from the other:
    on average, updates that are smaller than the distance of the two are not lost. Values of the
    type stay what they are, and copies of a variable on several replicas stay equal. Other ops
    round to nearest.

    It is PopART's session option `enableStochasticRounding`, and must be set before the session is
    created.
    """
    ir._pb_ir.getSessionOptions().enableStochasticRounding = enabled


def seed_stochastic_rounding(session: popxl.Session, seed: int) -> None:
    """Set the seed of stochastic rounding for the session's next runs.

    Each run takes the next random numbers.

    A session that is not seeded has the seed 0. To continue a stopped job exactly, seed before each
    run with a function of the job's seed and the number of the run.

    Args:
        seed: 0 <= seed < 2**64.

    Raises:
        ValueError: it is not.
    """
    session._pb_session.setRandomSeed(seed)


@jax_op(name="round_by_hash", no_grad="stored gradients are not differentiated")
def _lower_round_by_hash(t: Any, *, dtype: str) -> Any:
    from popxl.ops.var_updates._rounding import round_to_neighbor

    xp = t.__array_namespace__()
    x = t.view(xp.uint32)
    x = (x ^ (x >> 16)) * xp.uint32(0x85EBCA6B)  # MurmurHash3's last steps: a permutation in
    x = (x ^ (x >> 13)) * xp.uint32(0xC2B2AE35)  # which each bit depends on all
    return round_to_neighbor(t, np.dtype(dtype), (x ^ (x >> 16)).astype(xp.uint16))


def round_by_hash(t: popxl.Tensor, dtype: popxl.dtype) -> popxl.Tensor:
    """Round float32 to 16 bits, up or down by a hash of each value, deterministically.

    On average over many values that is the value itself, as with stochastic rounding. But nothing
    is drawn: the result depends on the tensor alone, not on when or where it is rounded.
    """
    if t.dtype == dtype:
        return t
    low = ops.cast(t, dtype)  # sharded as `t` is
    return ops.var_updates.copy_var_update_(low, _lower_round_by_hash(t, dtype=dtype.name))
