"""Linear layer with float8 matmuls in the forward and the backward pass."""

from __future__ import annotations

from typing import Any

import popxl
from popxl import ReplicaGrouping, ops
from popxl_addons.layers.initialisers import normal, zeros
from popxl_addons.layers.linear import Linear
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.fp8_amax_scale import fp8_amax_scale
from popxl_addons.ops.fp8_mse_scale import fp8_mse_scale
from popxl_addons.utils import WeightsDict, cast_if_needed


class LinearFP8(Module):
    """Linear layer y = x @ weight + bias; x and weight are cast to float8_143 for the matmul.

    Gradients that come in are cast to float8_152, which has the wider range (Micikevicius et al.,
    2022). The module has its own `build_grad`: use it with `create_graph` or `call_module`.

    Variables: `weight` (in_features, out_features), `bias` (out_features,), of the type of x.

    Args:
        out_features: length of the last axis of the output.
        bias: whether there is a bias.
        scale_metric: how scales are chosen: "amax": nothing overflows; "mse": least squared error;
            "manual_scale": `scale` for all.
        scale: log2 of the factor before casts, for "manual_scale".
        replica_grouping: replicas that share the variables.
    """

    def __init__(
        self,
        out_features: int,
        bias: bool = True,
        scale_metric: str = "amax",
        scale: int = 0,
        replica_grouping: ReplicaGrouping | None = None,
    ) -> None:
        super().__init__()
        if scale_metric not in ("amax", "mse", "manual_scale"):
            raise ValueError(
                f"unknown scale_metric {scale_metric!r}: use 'amax', 'mse' or 'manual_scale'"
            )
        self.out_features = out_features
        self.bias = bias
        self.scale_metric = scale_metric
        self.scale = scale
        self.replica_grouping = replica_grouping
        self.forward_fp8_type = popxl.float8_143
        self.grad_fp8_type = popxl.float8_152

    def fp8_scale(self, t: popxl.Tensor, dtype: popxl.dtype) -> popxl.Tensor:
        """Compute the log2 scale for casting `t` to a float8 dtype, an int32 scalar."""
        if self.scale_metric == "manual_scale":
            return popxl.constant(self.scale, popxl.int32)
        return (fp8_amax_scale if self.scale_metric == "amax" else fp8_mse_scale)(t, dtype)

    def _quantize(self, t: popxl.Tensor, dtype: popxl.dtype) -> tuple[popxl.Tensor, popxl.Tensor]:
        """Cast `t` to a float8 matrix (rows, last axis); returns it and its scale."""
        scale = self.fp8_scale(t, dtype)
        matrix = t.reshape((-1, t.shape[-1]))
        return ops.pow2scale_cast_to_fp8(matrix, scale, dtype), scale

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """Apply the layer: float16 or float32 (..., in_features) -> (..., out_features)."""
        shape = (x.shape[-1], self.out_features)
        grouping = self.replica_grouping
        w = self.add_variable_input("weight", normal(shape), x.dtype, replica_grouping=grouping)
        x8, w8 = (self._quantize(t, self.forward_fp8_type) for t in (x, w))
        self.aux["x"], self.aux["weight"], self.aux["shape"] = x8, w8, x.shape
        y = _float8_matmul(x8[0], w8[0], x8[1] + w8[1], x.dtype)
        y = y.reshape((*x.shape[:-1], self.out_features))
        if self.bias:
            b = self.add_variable_input(
                "bias", zeros(shape[1:]), x.dtype, replica_grouping=grouping
            )
            y = y + b
        return y

    def build_grad(self, dLdy: popxl.Tensor) -> popxl.Tensor:  # noqa: N803 - PopXL's name
        """Compute the gradient of x from that of the output, `dLdy`, and set the variables'."""
        dy, dy_scale = self._quantize(dLdy, self.grad_fp8_type)
        (x, x_scale), (w, w_scale) = self.aux["x"], self.aux["weight"]
        self.var_grad.weight = _float8_matmul(x.T, dy, x_scale + dy_scale, dLdy.dtype)
        if self.bias:
            self.var_grad.bias = ops.sum(dLdy.reshape((-1, dLdy.shape[-1])), axis=0)
        dx = _float8_matmul(dy, w.T, dy_scale + w_scale, dLdy.dtype)
        return dx.reshape(self.aux["shape"])

    @staticmethod
    def torch_mapping(
        variables: NamedTensors, nn_layer: Any, dtype: popxl.dtype = popxl.float32
    ) -> WeightsDict:
        """Map this layer's variables to the weights of a `torch.nn.Linear`."""
        return Linear.torch_mapping(variables, nn_layer, dtype)


def _float8_matmul(
    a: popxl.Tensor, b: popxl.Tensor, scale: popxl.Tensor, dtype: popxl.dtype
) -> popxl.Tensor:
    """Multiply float8 matrices a @ b and undo their scales."""
    y = ops.matmul_pow2scaled(a, b, ops.negate(scale))
    return cast_if_needed(y, dtype)
