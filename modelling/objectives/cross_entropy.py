"""Cross-entropy objective: mean negative log-likelihood of the labels, in nats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import popxl
from config.objectives import OBJECTIVES
from data.samples import IGNORE_INDEX, Batch, count_loss_tokens
from modelling.objectives.objective import Objective
from popxl import Tensor, ops
from popxl_addons.ops.cross_entropy_sharded_loss import cross_entropy_sharded_loss

if TYPE_CHECKING:
    from config.sections import RunConfig
    from modelling.layers.activation_layout import ActivationLayout
    from modelling.layers.parallel import ParallelGroups


class CrossEntropy(Objective):
    """Cross-entropy objective: mean negative log-likelihood over a global batch's labels.

    In training `training.label_smoothing` spreads a share of each label's probability evenly over
    the vocabulary; an evaluation is of the labels alone.

    Inputs: `labels`, int32 (batch, length), in [0, vocab_size), or `IGNORE_INDEX` for tokens that
        do not count.
    """

    token_inputs = {"labels": lambda labels: labels}  # noqa: RUF012
    sequence_inputs = {}  # noqa: RUF012
    absent_values = {"labels": IGNORE_INDEX}  # noqa: RUF012
    metrics = OBJECTIVES["cross_entropy"].metrics
    sums_token_losses = True

    def __init__(self, config: RunConfig) -> None:
        self._smoothing = 0.0 if config.model.eval else config.training.label_smoothing
        self._vocab_size = config.model.output_vocab_size

    def loss_stats(
        self,
        logits: Tensor,
        inputs: Mapping[str, Tensor],
        layout: ActivationLayout,
        groups: ParallelGroups,
    ) -> Tensor:
        smoothing, classes = self._smoothing, self._vocab_size
        labels = inputs["labels"]
        return token_losses(logits, labels, layout, groups, "sum", smoothing, classes)

    def loss(self, stats: Tensor, inputs: Mapping[str, Tensor], groups: ParallelGroups) -> Tensor:
        return stats

    def normalizer(self, batch: Batch) -> int:
        return count_loss_tokens(batch)


def token_losses(
    logits: Tensor,
    labels: Tensor,
    layout: ActivationLayout,
    groups: ParallelGroups,
    reduction: Literal["sum", "none"],
    label_smoothing: float = 0.0,
    vocab_size: int | None = None,
) -> Tensor:
    """Computes each label's negative log-likelihood, float32; 0 where it is `IGNORE_INDEX`.

    Args:
        logits: float32 (batch, length, local vocab size).
        labels: int32 (batch, length).
        layout: of the logits.
        reduction: "sum": a scalar; "none": (batch * length,) in the order of the logits.
        label_smoothing, vocab_size: see `cross_entropy_sharded_loss`.
    """
    local_vocab = logits.shape[-1]
    tokens = labels.nelms
    labels = layout.transpose_if_sequence_first(labels)
    logits, labels = logits.reshape((tokens, local_vocab)), labels.reshape((tokens,))
    ignored: Tensor = popxl.constant(IGNORE_INDEX, popxl.int32, "ignored")
    if groups.tensor_parallel > 1:
        offset = groups.tp_rank() * local_vocab
        labels, ignored = labels - offset, ignored - ops.reshape(offset, ())
    return cross_entropy_sharded_loss(
        logits,
        labels,
        ignored,
        replica_grouping=groups.tp,
        reduction=reduction,
        label_smoothing=label_smoothing,
        num_classes=vocab_size,
    )
