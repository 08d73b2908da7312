"""Logits of tokens with the vocabulary sharded over a tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import popxl
from modelling.objectives.token_logits import mask_logits, select_logits
from popxl import Tensor, ops

if TYPE_CHECKING:
    from modelling.layers.parallel import ParallelGroups

MASKED = -1e9
"""A logit whose exponential is 0, after division by any temperature."""

SMALLEST_SUM = 1e-37
"""Sum of exponentials that stands for none."""


@dataclass(frozen=True)
class ShardedLogits:
    """Logits of tokens, of which each replica of a tensor-parallel group has a part.

    Results are equal on the replicas of the group, and so are their gradients.

    Attributes:
        local: float32 (tokens, local vocab size), the part of this replica.
    """

    local: Tensor
    groups: ParallelGroups

    def mask_ids_from(self, vocab_size: int) -> ShardedLogits:
        """Masks the logits of ids from `vocab_size` on."""
        local_size = self.local.shape[-1]
        classes = np.arange(local_size * self.groups.tensor_parallel)
        if vocab_size >= len(classes):
            return self
        mask = np.where(classes < vocab_size, 0, MASKED)
        beyond: Tensor = popxl.constant(mask, popxl.float32, "beyond_the_vocabulary")
        if self.groups.tensor_parallel > 1:
            beyond = ops.collectives.replicated_slice(beyond, 0, self.groups.tp)
        return ShardedLogits(self.local + beyond.reshape((1, local_size)), self.groups)

    def subtract_max(self) -> ShardedLogits:
        """Subtracts the largest logit of each token, to which no gradient flows."""
        largest = ops.detach(ops.max(self.local, axis=-1, keepdims=True))
        if self.groups.tensor_parallel > 1:
            group = self.groups.tp
            largest = ops.detach(ops.collectives.replicated_all_reduce(largest, "max", group))
        return ShardedLogits(self.local - largest, self.groups)

    def scale_by_temperature(self, temperature: float) -> ShardedLogits:
        """Divides the logits by a temperature."""
        if temperature == 1:
            return self
        return ShardedLogits(self.local / temperature, self.groups)

    def logsumexp(self) -> Tensor:
        """Returns log(sum(exp)) over the vocabulary, float32 (tokens, 1); no logit may exceed 0.

        It is finite, and without gradient, where all logits are masked.
        """
        total = self.groups.reduce_from_tp(ops.sum(ops.exp(self.local), axis=-1, keepdims=True))
        return ops.log(ops.maximum(total, popxl.constant(SMALLEST_SUM, popxl.float32)))

    def log_softmax(self) -> ShardedLogits:
        """Returns log-probabilities; no logit may exceed 0."""
        total = self.groups.copy_to_tp(self.logsumexp())
        return ShardedLogits(self.local - total, self.groups)

    def gather_ids(self, ids: Tensor) -> Tensor:
        """Gathers the logits of token ids: int32 (tokens, k) -> float32 (tokens, k).

        Those of ids outside the vocabulary are 0.
        """
        return self.groups.reduce_from_tp(select_logits(self.local, self._local_ids(ids)))

    def mask_ids(self, ids: Tensor) -> ShardedLogits:
        """Masks the logits of token ids, int32 (tokens, k)."""
        masked = mask_logits(self.local, self._local_ids(ids), value=MASKED)
        return ShardedLogits(masked, self.groups)

    def top_k(self, k: int) -> tuple[Tensor, Tensor]:
        """Returns the k largest logits, float32 (tokens, k), and their ids, int32 (tokens, k)."""
        classes = self.local.shape[-1]
        values, ids = ops.topk(self.local, min(k, classes), 1, largest=True, sorted=True)
        if self.groups.tensor_parallel == 1:
            return values, ids
        ids += (self.groups.tp_rank() * classes).reshape((1, 1))
        gathered = [
            ops.collectives.replicated_all_gather(t, 1, self.groups.tp, "concat")
            for t in (values, ids)
        ]
        values, positions = ops.topk(gathered[0], k, 1, largest=True, sorted=True)
        return values, select_logits(gathered[1], positions)

    def _local_ids(self, ids: Tensor) -> Tensor:
        if self.groups.tensor_parallel == 1:
            return ids
        return ids - (self.groups.tp_rank() * self.local.shape[-1]).reshape((1, 1))
