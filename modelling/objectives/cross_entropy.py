"""The negative log-likelihood of the tokens that have a label, in nats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np

import popxl
from config.metrics import OBJECTIVES
from data.samples import IGNORE_INDEX, Batch, count_loss_tokens
from modelling.objectives.objective import Objective
from popxl import Tensor, ops
from popxl_addons.ops.cross_entropy_sharded_loss import cross_entropy_sharded_loss

if TYPE_CHECKING:
    from modelling.layers.axes import ActivationLayout
    from modelling.layers.parallel import ParallelGroups


class CrossEntropy(Objective):
    """The mean over the target tokens of a global batch.

    Inputs: `labels`, int32 (batch, length), in [0, vocabulary), or `IGNORE_INDEX` where there is no
    target.
    """

    token_inputs = {"labels": lambda tokens: tokens}  # noqa: RUF012
    sequence_inputs = {}  # noqa: RUF012
    metrics = OBJECTIVES["cross_entropy"]

    def loss_stats(
        self,
        logits: Tensor,
        inputs: Mapping[str, Tensor],
        layout: ActivationLayout,
        groups: ParallelGroups,
    ) -> Tensor:
        return token_losses(logits, inputs["labels"], layout, groups, "sum")

    def loss(self, sums: Tensor, inputs: Mapping[str, Tensor], groups: ParallelGroups) -> Tensor:
        return sums

    def normalizer(self, batch: Batch) -> int:
        return count_loss_tokens(batch)

    def keep_real_samples(self, batch: Batch, counted: np.ndarray) -> Batch:
        labels = batch["labels"].copy()
        rows = len(labels) // len(counted)  # targets of a sample
        labels[~np.repeat(counted, rows)] = IGNORE_INDEX
        return {**batch, "labels": labels}


def token_losses(
    logits: Tensor,
    labels: Tensor,
    layout: ActivationLayout,
    groups: ParallelGroups,
    reduction: Literal["sum", "none"],
) -> Tensor:
    """Negative log-likelihoods of the labels, 0 where there is none: float32.

    Args:
        reduction: the sum of all, or each, (batch * length,) in the order of activations.
    """
    classes, tokens, labels = logits.shape[-1], labels.nelms, layout.convert(labels)
    logits, labels = logits.reshape((tokens, classes)), labels.reshape((tokens,))
    ignored: Tensor = popxl.constant(IGNORE_INDEX, popxl.int32, "ignored")
    if groups.tensor_parallel > 1:
        offset = groups.tp_rank() * classes
        labels, ignored = labels - offset, ignored - ops.reshape(offset, ())
    return cross_entropy_sharded_loss(
        logits, labels, ignored, replica_grouping=groups.tp, reduction=reduction
    )
