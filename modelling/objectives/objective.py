"""The interface of training objectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

import popxl
from config.metrics import Metrics, MetricSums
from data.samples import Batch
from popxl import Tensor, TensorSpec

if TYPE_CHECKING:
    from modelling.layers.activation_layout import ActivationLayout
    from modelling.layers.parallel import ParallelGroups

LOSS_WEIGHT = "weight"
"""The input that multiplies the loss of a micro-batch.

The loss of a global batch is its sum divided by its normalizer. The weight is the number of
micro-batches divided by the normalizer, so that the mean of the weighted losses of all
micro-batches (of all data-parallel replicas) is that loss.
"""

SpecOf = Callable[[TensorSpec], TensorSpec]
"""Returns the spec of an input of a micro-batch on a replica, from that of its labels."""


def sequence_rows(sequences: int, width: int, per_row: int = 1) -> SpecOf:
    """Returns the spec, (rows, width), of an input with a row for `per_row` sequences each.

    Args:
        sequences: of a sample.
    """
    return lambda labels: TensorSpec((labels.shape[0] * sequences // per_row, width), popxl.float32)


class Objective(ABC):
    """Interface of a training objective: a loss and its metrics.

    The loss is computed in two steps, since the logits of all tokens may take more memory than a
    device has: statistics that are sums over tokens, for one chunk of tokens at a time; then the
    loss as a function of the statistics.

    Attributes:
        token_inputs: inputs of the statistics besides logits, by name: (batch, length).
        sequence_inputs: inputs of the loss besides the statistics, by name.
        metrics: of an evaluation, as functions of its metric sums.
        returns_stats: True if the statistics go to the host, for `metric_sums`.
        sums_token_losses: True if the statistics are a scalar, the loss.
        has_token_stats: True if the statistics are values of each token, not sums over tokens.
        absent_values: arrays of a batch with rows of each sample, and what they have for none.
        is_of_batch: True if the loss is a function of the vectors of the whole global batch.
        reads_logits: False if the statistics are of the hidden states before the LM head.
    """

    token_inputs: Mapping[str, SpecOf]
    sequence_inputs: Mapping[str, SpecOf]
    metrics: Metrics
    absent_values: Mapping[str, float]
    returns_stats: ClassVar[bool] = False
    sums_token_losses: ClassVar[bool] = False
    has_token_stats: ClassVar[bool] = False
    is_of_batch: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = True

    def input_specs(self, labels: TensorSpec) -> dict[str, TensorSpec]:
        """Returns the specs of all loss inputs besides logits by name, `LOSS_WEIGHT` included.

        Args:
            labels: spec of the labels, (batch, length).
        """
        specs = {**self.token_inputs, **self.sequence_inputs}
        inputs = {name: spec(labels) for name, spec in specs.items()}
        return inputs | {LOSS_WEIGHT: TensorSpec((), popxl.float32)}

    @property
    def input_names(self) -> list[str]:
        """Names of all loss inputs besides logits, `LOSS_WEIGHT` included."""
        return [*self.token_inputs, *self.sequence_inputs, LOSS_WEIGHT]

    @abstractmethod
    def loss_stats(
        self,
        logits: Tensor,
        inputs: Mapping[str, Tensor],
        layout: ActivationLayout,
        groups: ParallelGroups,
    ) -> Tensor:
        """Computes loss statistics of a chunk of tokens; they are summed over all chunks.

        If `has_token_stats`, they are concatenated: (batch, length, ...).

        Args:
            logits: float32 (batch, length, local vocab size), see `LMHead.build`.
            inputs: `token_inputs` by name.
            layout: of the logits.

        Returns:
            float32, equal on the replicas of a tensor-parallel group; the shape may depend on the
            number of sequences, but not on their length.
        """

    @abstractmethod
    def loss(self, stats: Tensor, inputs: Mapping[str, Tensor], groups: ParallelGroups) -> Tensor:
        """Computes a micro-batch's loss, a sum over its samples: float32 scalar.

        Args:
            stats: of all its tokens, see `loss_stats`.
            inputs: `sequence_inputs` by name.
        """

    @abstractmethod
    def normalizer(self, batch: Batch) -> int:
        """Returns this batch's term of the number that the global batch's loss is divided by."""

    def keep_real_samples(self, batch: Batch, is_real: np.ndarray) -> Batch:
        """Returns the batch with the labels removed from samples that only fill up the batch.

        Args:
            is_real: bool (samples,), False for samples that fill up.
        """
        masked = dict(batch)
        for name, value in self.absent_values.items():
            masked[name] = batch[name].copy()
            masked[name][~np.repeat(is_real, len(batch[name]) // len(is_real))] = value
        return masked

    def metric_sums(self, stats: np.ndarray, batch: Batch) -> MetricSums:
        """Returns sum and count of each metric over a batch, without the loss.

        Args:
            stats: of the batch's sequences, in order.
        """
        return {}
