"""Rows of an embedding that are trained beside its frozen others: PEFT's trainable tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import popxl
from modelling.layers.module import Module, cast
from popxl import Tensor, ops


class TokenRows(Module):
    """A matrix with other rows for some tokens.

    Variables, float32: `delta` (tokens, hidden), the same on all replicas.

    Args:
        tokens: their numbers, in the order of the rows of `delta`.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__()
        self._tokens = np.asarray(tokens, np.int32)

    def build(self, matrix: Tensor, transposed: bool = False) -> Tensor:
        """(rows, hidden) -> the same shape, of this replica's part of the vocabulary.

        Args:
            transposed: it is (hidden, rows), before and after.
        """
        rows, hidden = matrix.shape[::-1] if transposed else matrix.shape
        delta = self.variable("delta", (len(self._tokens), hidden), popxl.float32)
        places: Tensor = popxl.constant(np.arange(rows).reshape(rows, 1), popxl.int32, "rows")
        if self.groups.tensor_parallel > 1:
            places = places + self.groups.rank() * rows
        tokens = popxl.constant(self._tokens.reshape(1, -1), popxl.int32, "tokens")
        chosen = cast(ops.equal(places, tokens), popxl.float32)  # (rows, tokens)
        frozen = 1.0 - ops.sum(chosen, 1, keepdims=True)
        new = ops.matmul(chosen, self.groups.copy_to_tp(delta))
        if transposed:
            frozen, new = frozen.transpose((1, 0)), new.transpose((1, 0))
        return cast(cast(matrix, popxl.float32) * frozen + new, matrix.dtype)
