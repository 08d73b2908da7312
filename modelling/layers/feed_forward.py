"""Feed-forward layers, with the inner features cut over tensor parallelism."""

from __future__ import annotations

from modelling.layers.dropout import Dropout
from modelling.layers.layer import Layer
from modelling.layers.linear import FusedLinear, Linear
from modelling.layers.parallel import Groups
from popxl import Tensor, ops


class FeedForward(Layer):
    """wo(gelu(wi x + bias)), with gelu's tanh approximation, inside a sharded computation.

    Variables: `wi.weight` (hidden, inner / tensor_parallel), `wi.bias`; `wo.weight`
    (inner / tensor_parallel, hidden), without a bias: it belongs behind the sum over replicas.

    Args:
        hidden: features of the input and output.
        inner: features inside.
        group_size: of weights in 4 bits, see `Linear`.
    """

    def __init__(
        self, hidden: int, inner: int, groups: Groups, group_size: int | None = None
    ) -> None:
        super().__init__()
        part = groups.shard(inner, "inner features")
        self.wi = Linear(part, groups.sharded, bias=True, group_size=group_size)
        self.wo = Linear(hidden, groups.sharded, group_size=group_size)

    def build(self, x: Tensor) -> Tensor:
        """x: (..., hidden) -> this replica's part of the sum, of the same shape."""
        return self.wo(ops.gelu(self.wi(x)))


class GatedFeedForward(Layer):
    """wo(gelu(wi_0 x) * wi_1 x), with gelu's tanh approximation (Shazeer, arXiv:2002.05202).

    Variables: `wi.weight` (hidden, 2 * inner / tensor_parallel), a replica's columns of wi_0, then
    those of wi_1; `wo.weight` (inner / tensor_parallel, hidden). No biases.

    Args:
        hidden: features of the input and output.
        inner: features inside.
        dropout: of the inner features.
        scale: divisor of the inner features, undone at the end. With float16 it keeps the product
            of the two branches, and the sums in `wo`, in range.
        group_size: of weights in 4 bits, see `Linear`.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        dropout: Dropout,
        groups: Groups,
        scale: float = 1.0,
        group_size: int | None = None,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.dropout = dropout
        self.scale = scale
        part = groups.shard(inner, "inner features")
        self.wi = FusedLinear(part, 2, groups.sharded, group_size)
        self.wo = Linear(hidden, groups.sharded, group_size=group_size)

    def build(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (..., hidden) -> the same shape.

        Args:
            seed: for dropout, the same on the replicas of a tensor-parallel group.
        """
        gate, linear = self.wi(self.groups.open_sharded(x))
        gate = ops.gelu(gate)
        if self.scale != 1:
            gate = gate / self.scale
        inner = self.dropout(gate * linear, self.groups.own_seed(seed))
        y = self.groups.close_sharded(self.wo(inner))
        return y if self.scale == 1 else y * self.scale
