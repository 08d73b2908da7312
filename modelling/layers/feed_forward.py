"""Feed-forward layers, with the inner features cut over tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from config.model import FewBits
from modelling.layers.dropout import NO_DROPOUT, Dropout
from modelling.layers.layer import Layer
from modelling.layers.linear import FusedLinear, Linear
from modelling.layers.parallel import Groups
from popxl import Tensor, ops

Activation = Literal["gelu_tanh", "relu", "silu"]


def activation_of(name: Activation) -> Callable[[Tensor], Tensor]:
    """The function of a name: gelu_tanh is the tanh approximation of GELU (arXiv:1606.08415), silu
    is x * sigmoid(x) (arXiv:1702.03118)."""
    return dict(zip(get_args(Activation), (ops.gelu, ops.relu, ops.swish), strict=True))[name]


class FeedForward(Layer):
    """wo(activation(wi x + bias)), inside a sharded computation.

    Variables: `wi.weight` (hidden, inner / tensor_parallel), and `wi.bias` if there is one;
    `wo.weight` (inner / tensor_parallel, hidden), without a bias: it belongs after the sum over
    replicas.

    Args:
        hidden: features of the input and output.
        inner: features inside.
        few_bits: of weights, see `Linear`.
        bias: whether there is one.
        dropout: of the inner features.
        scale: divisor of the inner features, undone after the sum (`whole`). With float16 it keeps
            the products of two branches, and the sums in `wo`, in range.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        groups: Groups,
        few_bits: FewBits | None = None,
        activation: Activation = "gelu_tanh",
        bias: bool = False,
        dropout: Dropout = NO_DROPOUT,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.dropout = dropout
        self.scale = scale
        self.activation = activation_of(activation)
        part = groups.shard(inner, "inner features")
        self.wi = self.into(part, groups, bias, few_bits)
        self.wo = Linear(hidden, groups.sharded, few_bits=few_bits)

    def into(self, part: int, groups: Groups, bias: bool, few_bits: FewBits | None) -> Linear:
        """The map to the inner features, `part` of them on a replica."""
        return Linear(part, groups.sharded, bias, few_bits)

    def build(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (..., hidden) -> this replica's part of the sum, of the same shape.

        Args:
            seed: for dropout, the same on the replicas of a tensor-parallel group.
        """
        return self.wo(self.dropout(self.inner(x), self.groups.own_seed(seed)))

    def whole(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """Like `build`, outside of a sharded computation: (..., hidden) -> the same shape."""
        y = self.groups.reduce_from_tp(self(self.groups.copy_to_tp(x), seed))
        return y if self.scale == 1 else y * self.scale

    def inner(self, x: Tensor) -> Tensor:
        """The inner features of this replica."""
        return self.scaled(self.activation(self.wi(x)))

    def scaled(self, x: Tensor) -> Tensor:
        """Divided by the scale."""
        return x if self.scale == 1 else x / self.scale


class GatedFeedForward(FeedForward):
    """wo(activation(wi_0 x) * wi_1 x) (Shazeer, arXiv:2002.05202), inside a sharded computation.

    Variables: `wi.weight` (hidden, 2 * inner / tensor_parallel), a replica's columns of wi_0, then
    those of wi_1, and `wi.bias` likewise if there is one; `wo.weight`.
    """

    def into(self, part: int, groups: Groups, bias: bool, few_bits: FewBits | None) -> Linear:
        return FusedLinear(part, 2, groups.sharded, few_bits, bias)

    def inner(self, x: Tensor) -> Tensor:
        gate, linear = self.wi(x)
        return self.scaled(self.activation(gate)) * linear
