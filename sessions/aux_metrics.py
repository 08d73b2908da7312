"""Metrics of a batch besides its loss, counted once over all processes."""

from __future__ import annotations

import numpy as np

from config.metrics import Tally
from data.loader import BatchSharding
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


def expert_metrics(usage: np.ndarray) -> dict[str, float]:
    """How a batch used experts: what the loss that balances them is without its factor, 1 at best
    times the experts of a token, and the share of the choices that each expert has.

    Args:
        usage: float32 (micro-batches, 2, experts), see `count_expert_usage` of popxl_addons.
    """
    counts, probabilities = np.moveaxis(usage.astype(np.float64), 1, 0)
    tokens = np.maximum(probabilities.sum(1), 1)  # those of a token add up to 1
    balance = usage.shape[-1] * (counts * probabilities).sum(1) / tokens**2
    shares = counts.sum(0) / max(counts.sum(), 1)
    each = {f"experts/share/{n}": float(share) for n, share in enumerate(shares)}
    return {"experts/balance": float(balance.mean()), **each}
