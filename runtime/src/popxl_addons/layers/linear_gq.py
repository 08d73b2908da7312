"""Linear layer with weights in 4 bits, for inference."""

from __future__ import annotations

from typing import Any

import numpy as np

import popxl
from popxl import ReplicaGrouping, ops
from popxl.utils import to_numpy
from popxl_addons.layers.initialisers import normal, zeros
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.group_quantize_decompress import (
    group_quantize_compress_numpy as group_quantize_compress_numpy,
)
from popxl_addons.ops.group_quantize_decompress import group_quantize_decompress
from popxl_addons.utils import WeightsDict


class LinearGQ(Module):
    """y = x @ decompress(weight) + bias.

    Variables: `weight` (packed uint16), `weight_decompression_scale`,
    `weight_decompression_bias`, see `group_quantize_compress_numpy`; `bias` (out_features,).

    Args:
        out_features: length of the last axis of the output.
        bias: whether there is a bias.
        replica_grouping: replicas that share the variables.
        group_size: weights that share a scale; 0: all along `dim`.
        dim: axis of the weight (in_features, out_features) along which groups lie.
    """

    def __init__(
        self,
        out_features: int,
        bias: bool = True,
        replica_grouping: ReplicaGrouping | None = None,
        group_size: int = 0,
        dim: int = -1,
    ) -> None:
        super().__init__()
        self.out_features = out_features
        self.bias = bias
        self.replica_grouping = replica_grouping
        self.group_size = group_size
        self.dim = dim

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """x: (..., in_features) -> (..., out_features)."""
        shape = (x.shape[-1], self.out_features)
        size = self.group_size or shape[self.dim]
        packed = group_quantize_compress_numpy(normal(shape)(), size, self.dim)
        names = ("weight", "weight_decompression_scale", "weight_decompression_bias")
        parts = [self._variable(name, data) for name, data in zip(names, packed, strict=True)]
        words, scale, low = parts
        weight = group_quantize_decompress(words, scale, low, self.dim)
        y = x @ (weight if weight.dtype == x.dtype else ops.cast(weight, x.dtype))
        if not self.bias:
            return y
        return y + self._variable("bias", zeros(shape[1:])().astype(x.dtype.as_numpy()))

    def _variable(self, name: str, data: np.ndarray) -> popxl.Tensor:
        return self.add_variable_input(name, data, replica_grouping=self.replica_grouping)

    @staticmethod
    def torch_mapping(
        variables: NamedTensors,
        nn_layer: Any,
        dtype: popxl.dtype = popxl.float32,
        group_size: int = 64,
        dim: int = -1,
    ) -> WeightsDict:
        """The quantised weights of a `torch.nn.Linear` for the variables of this layer."""
        weight = to_numpy(nn_layer.weight, dtype).T
        packed, scale, low = group_quantize_compress_numpy(weight, group_size, dim)
        weights = WeightsDict(
            {
                variables.weight: packed,
                variables.weight_decompression_scale: scale,
                variables.weight_decompression_bias: low,
            }
        )
        if getattr(nn_layer, "bias", None) is not None:
            weights[variables.bias] = to_numpy(nn_layer.bias, dtype)
        return weights
