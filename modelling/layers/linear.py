"""Linear maps."""

from __future__ import annotations

from modelling.layers.layer import Layer
from popxl import ReplicaGrouping, Tensor, ops


class Linear(Layer):
    """y = x @ weight, for this replica's part of the weight; no communication.

    Variables: `weight` (in_features, out_features), and `bias` (out_features,) if there is one.

    Args:
        out_features: length of the output's last axis on a replica.
        grouping: replicas that hold the same part of the weight and the bias.
    """

    def __init__(self, out_features: int, grouping: ReplicaGrouping, bias: bool = False) -> None:
        super().__init__()
        self.out_features = out_features
        self.grouping = grouping
        self.bias = bias

    def build(self, x: Tensor) -> Tensor:
        """x: (..., in_features) -> (..., out_features)."""
        shape = (x.shape[-1], self.out_features)
        y = x @ self.weight("weight", shape, x.dtype, self.grouping)
        if not self.bias:
            return y
        return y + self.weight("bias", shape[1:], x.dtype, self.grouping)


class FusedLinear(Linear):
    """Several linear maps of one input as one product. The weights are side by side in `weight`.

    Args:
        out_features: of each map, on a replica.
        parts: number of maps.
    """

    def __init__(self, out_features: int, parts: int, grouping: ReplicaGrouping) -> None:
        super().__init__(out_features * parts, grouping)
        self.parts = parts

    def build(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """x: (..., in_features) -> `parts` times (..., out_features)."""
        return tuple(ops.split(super().build(x), self.parts, axis=-1))
