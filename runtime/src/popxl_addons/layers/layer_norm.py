"""Layer normalisation."""

from __future__ import annotations

from typing import Any

import popxl
from popxl import ops
from popxl.utils import to_numpy
from popxl_addons.layers.initialisers import ones, zeros
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import WeightsDict


class LayerNorm(Module):
    """Layer normalisation over the last axis, with scale and shift (Ba et al., 2016).

    Variables: `weight` and `bias`, both (features,).
    """

    def build(self, x: popxl.Tensor, eps: float = 1e-05) -> popxl.Tensor:
        """Normalise x: (..., features) -> the same shape."""
        self.weight = self.add_variable_input("weight", ones(x.shape[-1:]), x.dtype)
        self.bias = self.add_variable_input("bias", zeros(x.shape[-1:]), x.dtype)
        return ops.layer_norm(x, self.weight, self.bias, eps)

    @staticmethod
    def torch_mapping(
        variables: NamedTensors, nn_layer: Any, dtype: popxl.dtype = popxl.float32
    ) -> WeightsDict:
        """Map this layer's variables to the weights of a `torch.nn.LayerNorm`.

        Those of a norm over several axes are flattened, for programs that flatten its input.
        """
        return WeightsDict(
            {
                variables.weight: to_numpy(nn_layer.weight, dtype).ravel(),
                variables.bias: to_numpy(nn_layer.bias, dtype).ravel(),
            }
        )
