"""Sums over rows and columns of matrices of which a replica holds some elements.

A variable holds matrices side by side, cut along one axis over groups of replicas (tensor
parallelism); of what replicas hold alike, each may keep a flat part (replicated tensor sharding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

import popxl
from popxl import ReplicaGrouping, ops
from popxl_addons.sharding import shards_of


@dataclass(frozen=True)
class MatrixLayout:
    """The matrices that a variable belongs to.

    Attributes:
        count: matrices of equal size, side by side along the last axis.
        axis: along which they are cut into equal parts; None: not cut.
        across: the replicas that together hold all parts; None: those that share the variable.
    """

    count: int = 1
    axis: int | None = None
    shard_group: ReplicaGrouping | None = None

    @property
    def unsharded_axis(self) -> int:
        """An axis along which matrices are neither cut nor side by side."""
        return 0 if self.axis == 1 or (self.axis is None and self.count > 1) else 1


class ShardedMatrices:
    """A replica's elements of a variable as `count` blocks of the rows that they lie in.

    Anything but a matrix counts as one row.

    Args:
        var: the variable, or a replica's part of it.
        group: replicas that share the variable.

    Attributes:
        rows, columns, count: of the variable on a replica, whole; `columns` is that of one matrix.
        height: rows that a replica's elements lie in, at most.
    """

    def __init__(self, var: popxl.Tensor, group: ReplicaGrouping, whole: MatrixLayout) -> None:
        shape = tuple(var.meta_shape or var.shape)
        self.is_matrix = len(shape) == 2
        rows, width = shape if self.is_matrix else (1, math.prod(shape))
        axis = whole.axis if self.is_matrix or whole.axis is None else 1
        if width % whole.count or (whole.count > 1 and axis == 0):
            raise ValueError(
                f"{var.id!r} of shape {shape} does not hold {whole.count} matrices side by side"
            )
        self._spec, self._group, self._axis = var.spec, group, axis
        self._shard_group = (
            group if whole.axis is None or whole.shard_group is None else whole.shard_group
        )
        self._shards = shards_of(var.spec, group.group_size)
        self.rows, self.count, self.columns = rows, whole.count, width // whole.count
        self._width, part = width, math.prod(var.shape)
        self.height = rows
        if self._shards > 1:
            self.height = -(-part // width) + (1 if part % width else 0)
            self._find_start(part)

    def _find_start(self, part: int) -> None:
        """Where this replica's elements begin: the row, and the place in it."""
        copies = self._group.group_size // self._shards
        first = np.arange(self._group.group_size) // copies * part
        row = np.minimum(first // self._width, self.rows)
        self._first_row, self._first_column = (
            ops.collectives.replicated_slice(popxl.constant(at, popxl.int32), 0, self._group)
            for at in (row, first % self._width)
        )

    def replicas_with_equal_means(self, axis: int) -> ReplicaGrouping:
        """The replicas whose means along an axis, of rows (0) or columns, are the same."""
        return self._group if self._axis == axis else self._shard_group

    # ---- layout ---------------------------------------------------------------------------------
    def blocks(self, t: popxl.Tensor) -> popxl.Tensor:
        """Elements like the variable's -> (height, count, columns), zeros around them."""
        shape = (self.height, self.count, self.columns)
        if self._shards == 1:
            return t.reshape(shape)
        zeros = ops.init((math.prod(shape),), t.dtype)
        part = (math.prod(t.shape),)
        return ops.dynamic_update(zeros, self._first_column, t, (0,), part, True).reshape(shape)

    def elements(self, blocks: popxl.Tensor) -> popxl.Tensor:
        """The inverse of `blocks`."""
        if self._shards == 1:
            return blocks.reshape(self._spec.shape)
        part = (math.prod(self._spec.shape),)
        return ops.dynamic_slice(blocks.flatten(), self._first_column, (0,), part, True)

    def local_rows(self, t: popxl.Tensor) -> popxl.Tensor:
        """(rows, count) -> (height, count): those of this replica's elements, ones past the end."""
        if self._shards == 1:
            return t
        ones = ops.init((self.height, self.count), t.dtype) + 1
        longer = ops.concat([t, ones], 0)
        return ops.dynamic_slice(longer, self._first_row, (0,), (self.height,), True)

    # ---- means over whole matrices --------------------------------------------------------------
    def row_means(self, blocks: popxl.Tensor) -> popxl.Tensor:
        """Means of the rows of each matrix: (height, count, columns) -> (rows, count)."""
        sums = ops.sum(blocks, 2)
        if self._shards > 1:
            zeros = ops.init((self.rows + self.height, self.count), sums.dtype)
            sums = ops.dynamic_update(zeros, self._first_row, sums, (0,), (self.height,), True)
            sums = sums[: self.rows]
        return self._sum(sums, self._axis == 1) / (self.columns * self._num_shards(1))

    def column_means(self, blocks: popxl.Tensor) -> popxl.Tensor:
        """Means of the columns: (height, count, columns) -> (count, columns)."""
        return self._sum(ops.sum(blocks, 0), self._axis == 0) / (self.rows * self._num_shards(0))

    def means(self, blocks: popxl.Tensor) -> popxl.Tensor:
        """Mean of each matrix: (height, count, columns) -> (count,)."""
        elements = self.rows * self.columns * self._num_shards(0) * self._num_shards(1)
        return self._sum(ops.sum(blocks, (0, 2)), self._axis is not None) / elements

    def mean_of_means(self, rows: popxl.Tensor, columns: popxl.Tensor) -> popxl.Tensor:
        """Mean of each matrix (count,), from those of rows or columns, whichever are all here."""
        return ops.mean(columns, 1) if self._axis == 0 else ops.mean(rows, 0)

    def _num_shards(self, axis: int) -> int:
        """Into how many parts the matrices are cut along an axis."""
        return self._shard_group.group_size // self._group.group_size if self._axis == axis else 1

    def _sum(self, t: popxl.Tensor, over_shards: bool) -> popxl.Tensor:
        """The sum over replicas of what their elements add up to; those held twice count once."""
        group = self._shard_group if over_shards else self._group
        if over_shards and self._shards == 1:
            copies = self._group.group_size
        elif self._shards == 1:
            return t
        else:
            copies = self._group.group_size // self._shards
        total = ops.collectives.replicated_all_reduce(t, "add", group)
        return total if copies == 1 else total / copies
