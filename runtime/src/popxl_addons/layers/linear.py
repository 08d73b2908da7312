"""Linear (fully connected) layer."""

from __future__ import annotations

from typing import Any

import popxl
from popxl import ReplicaGrouping
from popxl.utils import to_numpy
from popxl_addons.layers.initialisers import normal, zeros
from popxl_addons.matrix_product import create_matrix_product
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import WeightsDict


class Linear(Module):
    """Linear layer: y = x @ weight + bias.

    Variables: `weight` (in_features, out_features), `bias` (out_features,); and state in
    `product`, if the layer is made in `popxl_addons.fp8_autocast`.

    Args:
        out_features: length of the last axis of the output.
        bias: whether there is a bias.
        replica_grouping: replicas that share the variables. For tensor parallelism, give each
            group its part of `out_features` (or of the input's last axis).
    """

    def __init__(
        self,
        out_features: int,
        bias: bool = True,
        replica_grouping: ReplicaGrouping | None = None,
    ) -> None:
        super().__init__()
        self.out_features = out_features
        self.bias = bias
        self.replica_grouping = replica_grouping
        self.product = create_matrix_product()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """Apply the layer: (..., in_features) -> (..., out_features)."""
        shape = (x.shape[-1], self.out_features)
        self.weight = self.add_variable_input(
            "weight", normal(shape), x.dtype, replica_grouping=self.replica_grouping
        )
        if not self.bias:
            return self.product(x, self.weight)
        self.b = self.add_variable_input(
            "bias", zeros(shape[1:]), x.dtype, replica_grouping=self.replica_grouping
        )
        return self.product(x, self.weight, self.b)

    @staticmethod
    def torch_mapping(
        variables: NamedTensors, nn_layer: Any, dtype: popxl.dtype = popxl.float32
    ) -> WeightsDict:
        """Map this layer's variables to the weights of a `torch.nn.Linear`."""
        weights = WeightsDict({variables.weight: to_numpy(nn_layer.weight, dtype).T})
        if getattr(nn_layer, "bias", None) is not None:
            weights[variables.bias] = to_numpy(nn_layer.bias, dtype)
        return weights
