"""The contrastive objective: InfoNCE over all positives and negatives of a global batch.

van den Oord et al., arXiv:1807.03748; in-batch negatives: Henderson et al., arXiv:1705.00652. As
MultipleNegativesRankingLoss of sentence-transformers, whose loss is of one device's batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

import popxl
from data.pooling import POOLED_IDS
from data.samples import Batch
from modelling.objectives.pooled import PooledObjective
from popxl import Tensor, ops

if TYPE_CHECKING:
    from config.sections import RunConfig
    from modelling.layers.activation_layout import ActivationLayout
    from modelling.layers.parallel import ParallelGroups

_MIN_SQUARE = 1e-24
"""Least square of a norm, as in torch's normalize."""
_ABSENT = -1e9
"""Score of a text that is not there."""


class Contrastive(PooledObjective):
    """Mean cross-entropy of each anchor's positive among all positives and negatives of a batch.

    Scores are cosine similarities times `training.scale`. With `training.symmetric` it is the mean
    of that and of the cross-entropy of each positive's anchor among all anchors.
    """

    sequence_inputs = {}  # noqa: RUF012
    is_of_batch = True
    absent_values = {POOLED_IDS: 0}  # noqa: RUF012

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.sequences_per_sample = config.max_texts_per_sample
        self._training = config.training

    def loss_stats(
        self,
        logits: Tensor,
        inputs: Mapping[str, Tensor],
        layout: ActivationLayout,
        groups: ParallelGroups,
    ) -> Tensor:
        """Normalizes vectors to length 1: float32 (texts, hidden) -> the same shape; 0 stays 0."""
        return logits / ops.sqrt(ops.maximum(_squared_norms(logits), _constant(_MIN_SQUARE)))

    def loss(self, stats: Tensor, inputs: Mapping[str, Tensor], groups: ParallelGroups) -> Tensor:
        """Computes the loss of a batch that is on one replica, see `loss_of_rows`."""
        return self.loss_of_rows(stats, stats)

    def loss_of_rows(self, vectors: Tensor, batch_vectors: Tensor) -> Tensor:
        """Computes the loss of some rows of a batch, a sum over its anchors: float32 scalar.

        Args:
            vectors: of the rows, float32 (texts, hidden); the texts of a row follow each other.
            batch_vectors: of the whole batch; those of texts that are not there are 0.
        """
        anchors, documents = self._split_rows(vectors)
        batch_anchors, batch_documents = self._split_rows(batch_vectors)
        positives = documents[:, 0]
        score = ops.sum(anchors * positives, 1) * self._training.scale
        loss = self._log_partition(anchors, batch_documents) - score
        if self._training.symmetric:
            loss = (loss + self._log_partition(positives, batch_anchors) - score) * 0.5
        is_row = 1.0 - _zero_vector_mask(anchors).reshape((-1,))
        return ops.sum(loss * is_row)

    def _split_rows(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Splits rows into anchors (rows, hidden) and documents (rows, texts - 1, hidden)."""
        hidden, texts = vectors.shape[-1], self._training.texts_per_row
        rows = vectors.reshape((-1, texts, hidden))
        return rows[:, 0], rows[:, 1:]

    def _log_partition(self, queries: Tensor, candidates: Tensor) -> Tensor:
        """Computes the log of the sum of exponential scores over all candidates: (queries,)."""
        candidates = candidates.reshape((-1, candidates.shape[-1]))
        scores = queries @ candidates.transpose() * self._training.scale
        return ops.logsumexp(scores + _zero_vector_mask(candidates).transpose() * _ABSENT, 1)

    # ---- on the host ------------------------------------------------------------------------
    def normalizer(self, batch: Batch) -> int:
        """Returns the number of a batch's anchors."""
        ids, texts = batch[POOLED_IDS], self._training.texts_per_row
        anchors = np.arange(1, self.sequences_per_sample + 1, texts)
        return int((ids[:, :, None] == anchors).any(axis=1).sum())


def _constant(value: float) -> Tensor:
    constant: Tensor = popxl.constant(value, popxl.float32)
    return constant


def _squared_norms(vectors: Tensor) -> Tensor:
    return ops.sum(vectors * vectors, -1, keepdims=True)


def _zero_vector_mask(vectors: Tensor) -> Tensor:
    """1 for vectors of zeros, which stand for no text, 0 for others: float32 (n, 1)."""
    return ops.cast(ops.equal(_squared_norms(ops.detach(vectors)), _constant(0.0)), popxl.float32)
