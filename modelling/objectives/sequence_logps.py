"""Log-probabilities of labels, and sums over the tokens of each sequence of packed samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import popxl
from modelling.objectives.cross_entropy import token_losses
from popxl import Tensor, ops

if TYPE_CHECKING:
    from modelling.layers.activation_layout import ActivationLayout
    from modelling.layers.parallel import ParallelGroups


def label_logps(
    logits: Tensor, labels: Tensor, layout: ActivationLayout, groups: ParallelGroups
) -> Tensor:
    """Computes the log-probability of each label, float32 (batch, length); 0 where it is ignored.

    Args:
        logits: float32 (batch, length, local vocab size) in `layout`.
        labels: int32 (batch, length).
    """
    batch, length = labels.shape
    losses = token_losses(logits, labels, layout, groups, "none")
    shape = (length, batch) if layout.transposed else (batch, length)
    return -layout.transpose_if_sequence_first(losses.reshape(shape))


def sum_by_sequence(values: Tensor, segment_ids: Tensor | None, sequences: int) -> Tensor:
    """Sums values of tokens over the sequences of each sample: (batch, length) -> (batch, n).

    Args:
        segment_ids: number of each token's sequence from 1, int32 (batch, length); None: samples
            are single sequences.
        sequences: n, the maximum number of sequences in a sample.
    """
    if segment_ids is None:
        return ops.sum(values, 1, keepdims=True)
    batch, length = values.shape
    numbers = np.arange(1, sequences + 1, dtype=np.int32).reshape(1, 1, -1)
    belongs = ops.equal(
        segment_ids.reshape((batch, length, 1)), popxl.constant(numbers, popxl.int32, "sequences")
    )
    return ops.sum(values.reshape((batch, length, 1)) * ops.cast(belongs, popxl.float32), 1)
