"""Linear maps."""

from __future__ import annotations

from config.model import FewBits
from modelling.layers.layer import Layer
from modelling.layers.low_rank import Adapters
from popxl import ReplicaGrouping, Tensor, ops
from popxl_addons.fp8 import matrix_product


class Linear(Layer):
    """y = x @ weight, for this replica's part of the weight; no communication.

    The product is an FP8 one if the layer is made in `popxl_addons.fp8_autocast`.

    Variables: `weight` (in_features, out_features), and `bias` (out_features,) if there is one; in
    FP8 those of `product`, see `popxl_addons.fp8.FP8Product`. A packed weight is `weight.packed`,
    `weight.scale` and `weight.bias`, see `modelling.quantisation`. Those of `adapters`, if it is
    given some (`adapt`).

    Args:
        out_features: length of the output's last axis on a replica.
        grouping: replicas that hold the same part of the weight and the bias.
        few_bits: how the weight is held; None: in the dtype of x.
    """

    def __init__(
        self,
        out_features: int,
        grouping: ReplicaGrouping,
        bias: bool = False,
        few_bits: FewBits | None = None,
    ) -> None:
        super().__init__()
        self.out_features = out_features
        self.grouping = grouping
        self.bias = bias
        self.few_bits = few_bits
        self.product = matrix_product()
        self.adapters: Adapters | None = None

    def build(self, x: Tensor) -> Tensor:
        """x: (..., in_features) -> (..., out_features)."""
        shape = (x.shape[-1], self.out_features)
        matrix = self.packed_weight("weight", shape, x.dtype, self.grouping, self.few_bits)
        bias = self.weight("bias", shape[1:], x.dtype, self.grouping) if self.bias else None
        y: Tensor = self.product(x, matrix, bias)
        return y if self.adapters is None else self.adapters(x, y, matrix, bias)


class FusedLinear(Linear):
    """Several linear maps of one input as one product. The weights are side by side in `weight`.

    Args:
        out_features: of each map, on a replica.
        parts: number of maps.
        grouping, few_bits, bias: see `Linear`.
    """

    def __init__(
        self,
        out_features: int,
        parts: int,
        grouping: ReplicaGrouping,
        few_bits: FewBits | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__(out_features * parts, grouping, bias, few_bits)
        self.parts = parts

    def build(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """x: (..., in_features) -> `parts` times (..., out_features)."""
        return tuple(ops.split(super().build(x), self.parts, axis=-1))
