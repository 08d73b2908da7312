"""Linear layer with group-quantized 4-bit weights, for inference."""

from __future__ import annotations

from typing import Any

import numpy as np

import popxl
from popxl import ReplicaGrouping
from popxl.utils import to_numpy
from popxl_addons.layers.initialisers import zeros
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.group_quantize_decompress import (
    group_quantize_compress_numpy as group_quantize_compress_numpy,
)
from popxl_addons.ops.group_quantize_decompress import group_quantize_decompress
from popxl_addons.utils import WeightsDict


class LinearGQ(Module):
    """Linear layer y = x @ dequantized weight + bias, with a group-quantized 4-bit weight.

    Variables, zeros at first: `weight_compressed` (uint16), `weight_decompression_scale` and
    `weight_decompression_bias`, see `group_quantize_compress_numpy`; `bias` (out_features,). All
    but the first have the type of the input.

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
        """Apply the layer: (..., in_features) -> (..., out_features)."""
        shape = (x.shape[-1], self.out_features)
        size = self.group_size or shape[self.dim]
        empty = np.broadcast_to(np.float16(0), shape)
        words, scale, low = group_quantize_compress_numpy(empty, size, self.dim)
        weight = group_quantize_decompress(
            self._add_zero_variable("weight_compressed", words.shape, popxl.uint16),
            self._add_zero_variable("weight_decompression_scale", scale.shape, x.dtype),
            self._add_zero_variable("weight_decompression_bias", low.shape, x.dtype),
            self.dim,
        )
        y = x @ weight
        return y + self._add_zero_variable("bias", shape[1:], x.dtype) if self.bias else y

    def _add_zero_variable(
        self, name: str, shape: tuple[int, ...], dtype: popxl.dtype
    ) -> popxl.Tensor:
        return self.add_variable_input(
            name, zeros(shape), dtype, replica_grouping=self.replica_grouping
        )

    @staticmethod
    def torch_mapping(
        variables: NamedTensors,
        nn_layer: Any,
        dtype: popxl.dtype = popxl.float32,
        group_size: int = 64,
        dim: int = -1,
    ) -> WeightsDict:
        """Quantize the weights of a `torch.nn.Linear` for this layer's variables."""
        weight = to_numpy(nn_layer.weight, dtype).T
        packed, scale, low = group_quantize_compress_numpy(weight, group_size, dim)
        weights = WeightsDict(
            {
                variables.weight_compressed: packed,
                variables.weight_decompression_scale: scale,
                variables.weight_decompression_bias: low,
            }
        )
        if getattr(nn_layer, "bias", None) is not None:
            weights[variables.bias] = to_numpy(nn_layer.bias, dtype)
        return weights
