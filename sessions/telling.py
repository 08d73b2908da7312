"""What an objective tells of a batch, counted once over all processes."""

from __future__ import annotations

import numpy as np

from config.metrics import Tally
from data.batches import BatchSharding
from data.samples import Batch
from modelling.objectives import Objective

_SUMS = "sums"  # among the arrays of a batch


def tally_of(
    objective: Objective, sharding: BatchSharding, sums: np.ndarray, batch: Batch
) -> Tally:
    """The tally of this process's samples, without those that an earlier process has too.

    Args:
        sums: of the samples of all processes, in the order of a global batch.
        batch: this process's samples.
    """
    once = sharding.without_duplicates({**batch, _SUMS: sharding.own_of(sums)})
    return objective.tally(once[_SUMS], once)
