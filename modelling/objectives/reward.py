"""Objective of reward models: of two texts the chosen one gets the larger score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from config.metrics import MetricSums
from data.labeled_samples import IS_LABELED, LABELS
from data.samples import Batch
from modelling.objectives.objective import sequence_rows
from modelling.objectives.pooled import MeanOverLabeledRows, PooledObjective
from modelling.objectives.preference import log_sigmoid
from popxl import Tensor, ops

if TYPE_CHECKING:
    from config.sections import RunConfig
    from modelling.layers.parallel import ParallelGroups


class RewardObjective(MeanOverLabeledRows, PooledObjective):
    """Mean over pairs of -log sigmoid(c - r - margin) + coefficient (c + r)², as in TRL.

    c and r are the scores of the chosen and the rejected text (Bradley and Terry, 1952; centring:
    Eisenstein et al., arXiv:2312.09244).

    Inputs: `LABELS`, float32 (pairs, 1): the margin; `IS_LABELED`, float32 (pairs, 1): 1, or 0
        without a pair.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._coefficient = config.training.center_rewards_coefficient
        spec = sequence_rows(self.sequences_per_sample, 1, per_row=2)
        self.sequence_inputs = {LABELS: spec, IS_LABELED: spec}

    def loss(self, stats: Tensor, inputs: Mapping[str, Tensor], groups: ParallelGroups) -> Tensor:
        chosen, rejected = ops.split(stats.reshape((-1, 2)), 2, 1)
        losses = -log_sigmoid(chosen - rejected - inputs[LABELS])
        if self._coefficient:
            total = chosen + rejected
            losses = losses + total * total * self._coefficient
        return ops.sum(losses * inputs[IS_LABELED])

    def metric_sums(self, stats: np.ndarray, batch: Batch) -> MetricSums:
        """Returns sums and counts of TRL's metrics; the least and largest reward are of a batch.

        Args:
            stats: float32, (pairs, 2) in any shape.
        """
        is_present = batch[IS_LABELED][:, 0] > 0
        rewards = stats.reshape(-1, 2).astype(np.float64)[is_present]
        if not len(rewards):
            return {}
        chosen, rejected = rewards.T
        pairs = float(len(rewards))
        return {
            "accuracy": (float(np.count_nonzero(chosen > rejected)), pairs),
            "margin": (float((chosen - rejected).sum()), pairs),
            "mean_reward": (float(rewards.sum()), 2 * pairs),
            "min_reward": (float(rewards.min()), 1.0),
            "max_reward": (float(rewards.max()), 1.0),
        }
