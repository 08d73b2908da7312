"""Rounding 16-bit variables at random when they are updated."""

from __future__ import annotations

import popxl


def enable_stochastic_rounding(ir: popxl.Ir, enabled: bool = True) -> None:
    """Round float16 and bfloat16 variables at random where `ops.var_updates` update them.

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
    """Make the random numbers of the following runs functions of `seed` and of how many they are.

    A session that is not seeded has the seed 0. To continue a stopped job exactly, seed before each
    run with a function of the job's seed and the number of the run.

    Args:
        seed: 0 <= seed < 2**64.

    Raises:
        ValueError: it is not.
    """
    session._pb_session.setRandomSeed(seed)
