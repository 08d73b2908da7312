"""Group normalisation."""

from __future__ import annotations

from typing import Any

import popxl
from popxl import ReplicaGrouping, ops
from popxl_addons.layers.initialisers import ones, zeros
from popxl_addons.layers.layer_norm import LayerNorm
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import WeightsDict


class GroupNorm(Module):
    """Group normalisation with scale and shift (Wu and He, 2018).

    Variables: `weight` and `bias`, both (channels,).

    Args:
        num_groups: into how many groups the channels are cut.
        replica_grouping: replicas that share the variables.
        eps: added to the variance.
        cache: see `Module`.
    """

    def __init__(
        self,
        num_groups: int,
        replica_grouping: ReplicaGrouping | None = None,
        eps: float = 1e-05,
        cache: bool = False,
    ) -> None:
        super().__init__(cache=cache)
        self.num_groups = num_groups
        self.replica_grouping = replica_grouping
        self.eps = eps

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """Normalise groups of channels: (batch, channels, ...) -> the same shape."""
        shape, grouping = (x.shape[1],), self.replica_grouping
        self.weight = self.add_variable_input(
            "weight", ones(shape), x.dtype, replica_grouping=grouping
        )
        self.bias = self.add_variable_input(
            "bias", zeros(shape), x.dtype, replica_grouping=grouping
        )
        return ops.group_norm(x, self.weight, self.bias, self.num_groups, self.eps)

    @staticmethod
    def torch_mapping(
        variables: NamedTensors, nn_layer: Any, dtype: popxl.dtype = popxl.float32
    ) -> WeightsDict:
        """Map this layer's variables to the weights of a `torch.nn.GroupNorm`."""
        return LayerNorm.torch_mapping(variables, nn_layer, dtype)
