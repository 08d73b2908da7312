"""Objectives of sequences: classification and regression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

import popxl
from config.metrics import MetricSums
from config.objectives import OBJECTIVES
from data.labeled_samples import IS_LABELED, LABELS
from data.pooling import POOLED_IDS
from data.samples import Batch
from modelling.objectives.objective import Objective, sequence_rows
from popxl import Tensor, ops

if TYPE_CHECKING:
    from config.sections import RunConfig
    from modelling.layers.activation_layout import ActivationLayout
    from modelling.layers.parallel import ParallelGroups


class PooledObjective(Objective):
    """Base class of objectives whose statistics are what the head makes of pooled sequences.

    Attributes:
        sequences_per_sample: at most.
    """

    returns_stats = True
    token_inputs = {POOLED_IDS: lambda tokens: tokens}  # noqa: RUF012

    def __init__(self, config: RunConfig) -> None:
        self.metrics = OBJECTIVES[config.training.objective].metrics
        self.sequences_per_sample = config.max_sequences_per_sample

    def loss_stats(
        self,
        logits: Tensor,
        inputs: Mapping[str, Tensor],
        layout: ActivationLayout,
        groups: ParallelGroups,
    ) -> Tensor:
        """Returns the head's output, float32 (sequences, scores)."""
        return logits


class MeanOverLabeledRows(Objective):
    """Mixin of objectives whose loss is a mean over the rows of `IS_LABELED`."""

    absent_values = {IS_LABELED: 0}  # noqa: RUF012

    def normalizer(self, batch: Batch) -> int:
        return int(np.count_nonzero(batch[IS_LABELED]))


class LabelObjective(MeanOverLabeledRows, PooledObjective):
    """Mean loss over labeled sequences: cross-entropy, binary cross-entropy or squared error.

    As `transformers.loss.loss_utils.ForSequenceClassificationLoss`: cross-entropy for one class of
    several; binary cross-entropy, averaged over classes, for several; else the squared error.

    Inputs: `LABELS`, float32 (sequences, scores): 1 for the classes of a sequence and 0 for the
        others, or its number; `IS_LABELED`, float32 (sequences, 1): 1, or 0 without a sequence.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._is_regression = config.training.objective == "regression"
        self._is_multi_label = bool(config.training.multi_label)
        sequences = self.sequences_per_sample
        self.sequence_inputs = {
            LABELS: sequence_rows(sequences, config.num_labels),
            IS_LABELED: sequence_rows(sequences, 1),
        }

    def loss(self, stats: Tensor, inputs: Mapping[str, Tensor], groups: ParallelGroups) -> Tensor:
        labels = inputs[LABELS]
        if self._is_regression:
            losses = (stats - labels) * (stats - labels)
        elif self._is_multi_label:
            zeros = popxl.constant(np.zeros((*stats.shape, 1)), popxl.float32, "zeros")
            logits = ops.concat([zeros, stats.reshape((*stats.shape, 1))], 2)
            losses = ops.logsumexp(logits, 2) - stats * labels
        else:
            losses = (ops.logsumexp(stats, 1, keepdims=True) - stats) * labels
        total = ops.sum(losses * inputs[IS_LABELED])
        averages = self._is_regression or self._is_multi_label
        return total / labels.shape[1] if averages else total

    def metric_sums(self, stats: np.ndarray, batch: Batch) -> MetricSums:
        """Returns sums and counts of what the metrics are functions of.

        Args:
            stats: float32, (sequences, scores) in any shape.
        """
        labels = batch[LABELS].astype(np.float64)
        is_labeled = batch[IS_LABELED][:, 0] > 0
        scores = stats.reshape(labels.shape).astype(np.float64)[is_labeled]
        if self._is_regression:
            return regression_metric_sums(scores, labels[is_labeled])
        predicted = scores > 0
        if not self._is_multi_label:
            predicted = np.eye(labels.shape[1], dtype=bool)[scores.argmax(axis=1)]
        return classification_metric_sums(predicted, labels[is_labeled] > 0)


def classification_metric_sums(predicted: np.ndarray, expected: np.ndarray) -> MetricSums:
    """Returns the counts of right sequences and, per class, of right and wrong predictions.

    Args:
        predicted, expected: bool (sequences, classes).
    """
    is_right = (predicted == expected).all(axis=1)
    sums = {"accuracy": (float(is_right.sum()), float(len(is_right)))}
    for index in range(expected.shape[1]):
        p, e = predicted[:, index], expected[:, index]
        # F1 is twice the first number divided by the second.
        sums[f"f1/{index}"] = (float((p & e).sum()), float(p.sum() + e.sum()))
    return sums


def regression_metric_sums(scores: np.ndarray, labels: np.ndarray) -> MetricSums:
    """Returns the sums of absolute errors and of the moments that Pearson's correlation needs.

    Args:
        scores, labels: float64 of one shape.
    """
    x, y = scores.reshape(-1), labels.reshape(-1)
    moments = {"x": x, "y": y, "xx": x * x, "yy": y * y, "xy": x * y}
    values = {"mae": np.abs(x - y), **{f"moment/{name}": v for name, v in moments.items()}}
    return {name: (float(v.sum()), float(len(v))) for name, v in values.items()}
