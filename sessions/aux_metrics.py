"""Metrics of a batch besides its loss, each sample counted once over all processes."""

from __future__ import annotations

import numpy as np

from config.metrics import MetricSums
from data.loader import BatchSharding
from data.samples import Batch
from modelling.objectives import Objective

_SUMS = "sums"  # among the arrays of a batch


def compute_metric_sums(
    objective: Objective, sharding: BatchSharding, sums: np.ndarray, batch: Batch
) -> MetricSums:
    """Compute metric sums of this process's samples, without those an earlier process also has.

    Args:
        sums: loss statistics of all processes' samples, in the order of a global batch.
        batch: this process's samples.
    """
    unique = sharding.drop_replicated_samples({**batch, _SUMS: sharding.select_local_rows(sums)})
    return objective.metric_sums(unique[_SUMS], unique)


def expert_metrics(usage: np.ndarray) -> dict[str, float]:
    """Compute the unscaled load-balancing loss and the load of each expert.

    The loss is at least the number of experts per token; a load is a fraction of all choices.

    Args:
        usage: float32 (micro-batches, 2, experts), see `count_expert_usage` of popxl_addons.
    """
    counts, probabilities = np.moveaxis(usage.astype(np.float64), 1, 0)
    tokens = np.maximum(probabilities.sum(1), 1)  # the probabilities of a token add up to 1
    loss = usage.shape[-1] * (counts * probabilities).sum(1) / tokens**2
    fractions = counts.sum(0) / max(counts.sum(), 1)
    loads = {f"experts/load/{n}": float(share) for n, share in enumerate(fractions)}
    return {"experts/load_balancing_loss": float(loss.mean()), **loads}
