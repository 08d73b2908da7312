"""Row and column means of matrices of which each replica has a flat shard.

A variable holds matrices side by side, sharded along one axis by tensor parallelism. Replicas with
equal values can hold flat shards of them (replicated tensor sharding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

import popxl
from popxl import ReplicaGrouping, ops
from popxl_addons.sharding import num_shards_of_spec


@dataclass(frozen=True)
class MatrixLayout:
    """Layout of a variable that consists of matrices side by side: their number and sharding.

    Attributes:
        count: number of matrices of equal size, side by side along the last axis.
        axis: axis along which they are sharded by tensor parallelism; None: not sharded.
        shard_group: replicas that together hold all shards; None: those that share the variable.
        size: length of `axis` of one matrix over all shards, without the zeros that pad the last
            ones; None: there are none.
    """

    count: int = 1
    axis: int | None = None
    shard_group: ReplicaGrouping | None = None
    size: int | None = None

    @property
    def unsharded_axis(self) -> int:
        """Matrix axis along which matrices are neither sharded nor concatenated."""
        return 0 if self.axis == 1 or (self.axis is None and self.count > 1) else 1


class ShardedMatrices:
    """One replica's flat shard of a variable, viewed as rows of matrices, padded to full rows.

    A variable that is no matrix counts as one row.

    Args:
        var: the variable, or a replica's flat shard of it.
        group: replicas that share the variable.
        layout: layout of the matrices in the variable.

    Attributes:
        rows: number of rows of the full variable on a replica.
        columns: number of columns of one matrix.
        count: number of matrices.
        height: maximum number of rows that a shard covers.
    """

    def __init__(self, var: popxl.Tensor, group: ReplicaGrouping, layout: MatrixLayout) -> None:
        shape = tuple(var.meta_shape or var.shape)
        self.is_matrix = len(shape) == 2
        rows, width = shape if self.is_matrix else (1, math.prod(shape))
        axis = layout.axis if self.is_matrix or layout.axis is None else 1
        if width % layout.count or (layout.count > 1 and axis == 0):
            raise ValueError(
                f"{var.id!r} of shape {shape} does not hold {layout.count} matrices side by side"
            )
        self._spec, self._group, self._axis = var.spec, group, axis
        self._shard_group = (
            group if layout.axis is None or layout.shard_group is None else layout.shard_group
        )
        self._shards = num_shards_of_spec(var.spec, group.group_size)
        self.rows, self.count, self.columns = rows, layout.count, width // layout.count
        self._size = layout.size
        self._width, shard_size = width, math.prod(var.shape)
        self.height = rows
        if self._shards > 1:
            self.height = -(-shard_size // width) + (1 if shard_size % width else 0)
            self._find_shard_start(shard_size)

    def _find_shard_start(self, shard_size: int) -> None:
        """Compute the row and the column at which this replica's shard begins."""
        num_copies = self._group.group_size // self._shards
        first = np.arange(self._group.group_size) // num_copies * shard_size
        row = np.minimum(first // self._width, self.rows)
        self._first_row, self._first_column = (
            ops.collectives.replicated_slice(popxl.constant(at, popxl.int32), 0, self._group)
            for at in (row, first % self._width)
        )

    def replicas_with_equal_means(self, axis: int) -> ReplicaGrouping:
        """Replicas that have equal means per row (axis 0) or per column (axis 1)."""
        return self._group if self._axis == axis else self._shard_group

    # ---- layout ---------------------------------------------------------------------------------
    def to_blocks(self, t: popxl.Tensor) -> popxl.Tensor:
        """Reshape a flat shard to (height, count, columns), zero-padded to full rows."""
        shape = (self.height, self.count, self.columns)
        if self._shards == 1:
            return t.reshape(shape)
        zeros = ops.init((math.prod(shape),), t.dtype)
        shard_size = (math.prod(t.shape),)
        return ops.dynamic_update(zeros, self._first_column, t, (0,), shard_size, True).reshape(
            shape
        )

    def from_blocks(self, blocks: popxl.Tensor) -> popxl.Tensor:
        """Reshape (height, count, columns) back to the flat shard; the inverse of `to_blocks`."""
        if self._shards == 1:
            return blocks.reshape(self._spec.shape)
        shard_size = (math.prod(self._spec.shape),)
        return ops.dynamic_slice(blocks.flatten(), self._first_column, (0,), shard_size, True)

    def local_rows(self, t: popxl.Tensor) -> popxl.Tensor:
        """Select the shard's rows of all: (rows, count) -> (height, count); 1 past the end."""
        if self._shards == 1:
            return t
        ones = ops.init((self.height, self.count), t.dtype) + 1
        padded = ops.concat([t, ones], 0)
        return ops.dynamic_slice(padded, self._first_row, (0,), (self.height,), True)

    # ---- means over full matrices ---------------------------------------------------------------
    def row_means(self, blocks: popxl.Tensor) -> popxl.Tensor:
        """Compute row means over all shards: (height, count, columns) -> (rows, count)."""
        sums = ops.sum(blocks, 2)
        if self._shards > 1:
            zeros = ops.init((self.rows + self.height, self.count), sums.dtype)
            sums = ops.dynamic_update(zeros, self._first_row, sums, (0,), (self.height,), True)
            sums = sums[: self.rows]
        return self._sum_over_replicas(sums, self._axis == 1) / self._length(1)

    def column_means(self, blocks: popxl.Tensor) -> popxl.Tensor:
        """Compute column means over all shards: (height, count, columns) -> (count, columns)."""
        return self._sum_over_replicas(ops.sum(blocks, 0), self._axis == 0) / self._length(0)

    def matrix_means(self, blocks: popxl.Tensor) -> popxl.Tensor:
        """Compute each matrix's mean over all shards: (height, count, columns) -> (count,)."""
        elements = self._length(0) * self._length(1)
        return self._sum_over_replicas(ops.sum(blocks, (0, 2)), self._axis is not None) / elements

    def combine_means(self, rows: popxl.Tensor, columns: popxl.Tensor) -> popxl.Tensor:
        """Compute each matrix's mean, (count,), from the means along its unsharded axis."""
        return ops.mean(columns, 1) if self._axis == 0 else ops.mean(rows, 0)

    def _length(self, axis: int) -> int:
        """Length of an axis of a full matrix, without padding."""
        local = self.columns if axis else self.rows
        if self._axis != axis:
            return local
        return self._size or local * self._shard_group.group_size // self._group.group_size

    def _sum_over_replicas(self, t: popxl.Tensor, over_shards: bool) -> popxl.Tensor:
        """Sum a tensor over replicas; elements that several replicas hold count once."""
        group = self._shard_group if over_shards else self._group
        if over_shards and self._shards == 1:
            num_copies = self._group.group_size
        elif self._shards == 1:
            return t
        else:
            num_copies = self._group.group_size // self._shards
        total = ops.collectives.replicated_all_reduce(t, "add", group)
        return total if num_copies == 1 else total / num_copies
