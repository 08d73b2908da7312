"""A random seed that changes from run to run."""

from __future__ import annotations

import numpy as np

import popxl
from popxl import ReplicaGrouping, Tensor, Variable, ops

__all__ = ["seed_variable"]


def seed_variable(
    seed: int, replica_grouping: ReplicaGrouping | None = None
) -> tuple[Variable, Tensor]:
    """Create a variable holding a seed, and draw a seed for this run from it.

    Args:
        seed: start value, 0 <= seed < 2**64.
        replica_grouping: replicas that draw the same seeds; default: each draws its own.

    Returns:
        The variable, uint32 (2,) on each replica, which is replaced in each run; and the seed to
        use, uint32 (2,).
    """
    ir = popxl.gcg().ir
    grouping = ir.replica_grouping(group_size=1) if replica_grouping is None else replica_grouping
    seeds = popxl.create_seeds(seed, replicas=grouping.num_groups)
    variable = popxl.variable(
        np.asarray(seeds, np.uint32), popxl.uint32, "random_seed", replica_grouping=grouping
    )
    seed_now, seed_next = ops.split_random_seed(variable)
    ops.var_updates.copy_var_update_(variable, seed_next)
    return variable, seed_now
