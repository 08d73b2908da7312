"""The loss of a global batch as a function of the vectors of all its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from modelling.layers.chunk_loop import ChunkLoop, LossChunkLoop
from modelling.layers.module import Module
from popxl import Tensor

if TYPE_CHECKING:
    from modelling.objectives import Contrastive

MAX_SCORE_BYTES = 2**30
"""Limit on the scores that a replica computes at a time."""


class BatchLoss(Module):
    """The loss of a replica's rows among the vectors of all replicas, in chunks of rows.

    Args:
        objective: computes the loss of some rows.
    """

    def __init__(self, objective: Contrastive) -> None:
        super().__init__()
        self._objective = objective

    def build(self, vectors: Tensor, batch_vectors: Tensor) -> Tensor:
        """Returns the loss of the rows, a sum: float32 scalar.

        Args:
            vectors: of this replica, float32 (texts, hidden).
            batch_vectors: of all replicas, float32 (all texts, hidden).
        """
        texts_per_row = self.config.training.texts_per_row
        rows = vectors.shape[0] // texts_per_row
        num_chunks = _num_chunks(rows, 4 * rows * batch_vectors.shape[0])

        def loss_of_chunk(inputs: Sequence[Tensor], seed: Tensor | None) -> Tensor:
            return self._objective.loss_of_rows(*inputs)

        if num_chunks == 1:
            return loss_of_chunk([vectors, batch_vectors], None)
        if self.config.model.eval:
            loop = ChunkLoop(loss_of_chunk, num_chunks, [0, None], 2, out_axis=None)
            return self.call_module(loop, "rows", autodiff="none")([vectors, batch_vectors])[0]
        loop = LossChunkLoop(loss_of_chunk, num_chunks, [0, None], 2)
        return self.call_module(loop, "rows")([vectors, batch_vectors])[0]


def _num_chunks(rows: int, nbytes: int) -> int:
    """Returns the smallest divisor of `rows` by which `nbytes` is within `MAX_SCORE_BYTES`."""
    divisors = (n for n in range(1, rows + 1) if rows % n == 0)
    return next((n for n in divisors if nbytes <= n * MAX_SCORE_BYTES), rows)
