"""Embedding layer whose vocabulary can be sharded over replicas."""

from __future__ import annotations

import numpy as np

import popxl
from popxl import ReplicaGrouping, ops
from popxl_addons.layers.initialisers import normal
from popxl_addons.module import Module

MULTISLICE_MAGIC_NUMBER = 16
"""Rows of a shard of the vocabulary are padded to a multiple of it."""


class Embedding(Module):
    """Embedding: looks up rows of a weight matrix by index.

    With a `replica_grouping` of several groups, each group has a shard of the vocabulary. Then
    the indices are relative to the shard (the index minus `offsets[group]`), indices of other
    shards give zeros, and the sum over the groups is the embedding: follow it with an all-reduce.

    Variables: `weight` (vocab_shard_size, hidden_size), or transposed for `axis` 1. Rows beyond the
    vocabulary are padding: pad host data with `array_munging.pad_axis`.

    Args:
        dtype: of the weight and the output.
        vocab_size: number of rows of the whole table.
        hidden_size: length of a row.
        axis: axis of the weight that the indices count along.
        replica_grouping: replicas that share a shard.
    """

    def __init__(
        self,
        dtype: popxl.dtype,
        vocab_size: int,
        hidden_size: int,
        axis: int = 0,
        replica_grouping: ReplicaGrouping | None = None,
    ) -> None:
        super().__init__()
        if axis not in (0, 1):
            raise ValueError(f"the axis of an embedding must be 0 or 1, but is {axis}")
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.axis = axis
        self.replica_grouping = replica_grouping
        self.n_shards = 1 if replica_grouping is None else replica_grouping.num_groups
        self.vocab_shard_size = self.get_vocab_shard_size(vocab_size, self.n_shards)
        self.offsets = self.get_offsets(vocab_size, self.n_shards)

    @staticmethod
    def get_vocab_shard_size(vocab_size: int, n_shards: int) -> int:
        """Number of rows of each vocabulary shard, a multiple of 16."""
        rows = -(-vocab_size // n_shards)
        return -(-rows // MULTISLICE_MAGIC_NUMBER) * MULTISLICE_MAGIC_NUMBER

    @staticmethod
    def get_offsets(vocab_size: int, n_shards: int) -> np.ndarray:
        """Index of each vocabulary shard's first row, int32 (n_shards,)."""
        size = Embedding.get_vocab_shard_size(vocab_size, n_shards)
        return np.arange(n_shards, dtype=np.int32) * size

    def build(self, indices: popxl.Tensor) -> popxl.Tensor:
        """Look up the rows of `indices`, integers of any shape -> (*shape, hidden_size)."""
        shape = (self.vocab_shard_size, self.hidden_size)
        self.weight = self.add_variable_input(
            "weight",
            normal(shape if self.axis == 0 else shape[::-1]),
            self.dtype,
            replica_grouping=self.replica_grouping,
        )
        return ops.gather(self.weight, indices, axis=self.axis, zero_OOR=self.n_shards > 1)
