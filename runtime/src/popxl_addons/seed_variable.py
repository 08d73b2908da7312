"""A random seed as a variable of the program, so that checkpoints include it."""

from __future__ import annotations

import numpy as np

import popxl
from popxl import ReplicaGrouping, Tensor, Variable

__all__ = ["seed_variable"]


def seed_variable(
    seed: int, replica_grouping: ReplicaGrouping | None = None
) -> tuple[Variable, Tensor]:
    """Create a variable with one random seed per replica group.

    Only the program changes it: `current, following = ops.split_random_seed(seed)`, and
    `ops.var_updates.copy_var_update_(seed, following)` for other numbers in the next run.

    Args:
        seed: start value, 0 <= seed < 2**64, from which the groups' seeds are drawn.
        replica_grouping: replicas that have the same seed; default: each has its own.

    Returns:
        The variable, to be saved and restored; and its value on the device, uint32 (2,).
    """
    ir = popxl.gcg().ir
    grouping = ir.replica_grouping(group_size=1) if replica_grouping is None else replica_grouping
    seeds = popxl.create_seeds(seed, replicas=grouping.num_groups)
    variable = popxl.variable(
        np.asarray(seeds, np.uint32), popxl.uint32, "random_seed", replica_grouping=grouping
    )
    return variable, variable
