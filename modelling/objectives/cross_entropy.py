"""The negative log-likelihood of the tokens that have a label, in nats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

import popxl
from config.metrics import OBJECTIVES
from data.samples import IGNORE_INDEX, Batch, labelled_tokens
from modelling.objectives.objective import Objective
from popxl import Tensor, ops
from popxl_addons.ops.cross_entropy_sharded_loss import cross_entropy_sharded_loss

if TYPE_CHECKING:
    from modelling.layers.axes import Axes
    from modelling.layers.parallel import Groups


class CrossEntropy(Objective):
    """The mean over the target tokens of a global batch.

    Inputs: `labels`, int32 (batch, length), in [0, vocabulary), or `IGNORE_INDEX` where there is no
    target.
    """

    inputs = {"labels": lambda tokens: tokens}  # noqa: RUF012
    metrics = OBJECTIVES["cross_entropy"]

    def loss(
        self, logits: Tensor, inputs: Mapping[str, Tensor], axes: Axes, groups: Groups
    ) -> Tensor:
        labels, classes = inputs["labels"], logits.shape[-1]
        tokens, labels = labels.nelms, axes.swap(labels)
        logits, labels = logits.reshape((tokens, classes)), labels.reshape((tokens,))
        ignored: Tensor = popxl.constant(IGNORE_INDEX, popxl.int32, "ignored")
        if groups.tensor_parallel > 1:
            offset = groups.rank() * classes
            labels, ignored = labels - offset, ignored - ops.reshape(offset, ())
        return cross_entropy_sharded_loss(
            logits, labels, ignored, replica_grouping=groups.tp, reduction="sum"
        )

    def normaliser(self, batch: Batch) -> int:
        return labelled_tokens(batch)

    def only(self, batch: Batch, counted: np.ndarray) -> Batch:
        labels = batch["labels"].copy()
        rows = len(labels) // len(counted)  # targets of a sample
        labels[~np.repeat(counted, rows)] = IGNORE_INDEX
        return {**batch, "labels": labels}
