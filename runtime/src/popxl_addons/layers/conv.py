"""Convolution layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import popxl
from popxl import ReplicaGrouping, ops
from popxl.utils import to_numpy
from popxl_addons.layers.initialisers import normal, zeros
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import WeightsDict


class Conv2D(Module):
    """2D convolution over the height and width of images.

    Variables: `weight` (out_channels, in_channels / groups, height, width), `bias`
    (1, out_channels, 1, 1).

    Args:
        out_channels: channels of the output.
        kernel_size: height and width of the kernel; a number means both.
        strides, dilations: for height and width.
        paddings: rows and columns of zeros (top, left, bottom, right), or an automatic mode of
            `ops.conv`: "same_upper", "same_lower", "valid".
        groups: into how many groups channels are cut, each convolved on its own.
        bias: whether there is a bias.
        available_memory_proportions, partials_types, enable_conv_dithering: hints; no effect.
        replica_grouping: replicas that share the variables.
    """

    def __init__(
        self,
        out_channels: int,
        kernel_size: Sequence[int] | int,
        strides: Sequence[int] | None = (1, 1),
        paddings: str | Sequence[int] | None = (0, 0, 0, 0),
        dilations: Sequence[int] | None = (1, 1),
        groups: int | None = 1,
        bias: bool = True,
        available_memory_proportions: list[float] | None = None,
        partials_types: list[str] | None = None,
        enable_conv_dithering: list[int] | None = None,
        replica_grouping: ReplicaGrouping | None = None,
    ) -> None:
        super().__init__()
        self.out_channels = out_channels
        sizes = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        self.kernel_size = tuple(sizes)
        self.strides = tuple(strides or (1, 1))
        self.dilations = tuple(dilations or (1, 1))
        self.groups = groups or 1
        self.bias = bias
        self.pad_type: Any = "not_set"
        self.paddings: tuple[int, ...] = (0, 0, 0, 0)
        if isinstance(paddings, str):
            self.pad_type = paddings
        elif paddings is not None:
            self.paddings = tuple(paddings)
        self.available_memory_proportions = available_memory_proportions
        self.partial_types = partials_types
        self.enable_conv_dithering = enable_conv_dithering
        self.replica_grouping = replica_grouping

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """Convolve images: (batch, in_channels, height, width) -> (batch, out_channels, h', w')."""
        shape = (self.out_channels, x.shape[1] // self.groups, *self.kernel_size)
        self.weight = self.add_variable_input(
            "weight", normal(shape), x.dtype, replica_grouping=self.replica_grouping
        )
        y = ops.conv(
            x,
            self.weight,
            stride=self.strides,
            padding=self.paddings,
            dilation=self.dilations,
            groups=self.groups,
            pad_type=self.pad_type,
            available_memory_proportions=self.available_memory_proportions,
            partials_types=self.partial_types,
            enable_conv_dithering=self.enable_conv_dithering,
        )
        if self.bias:
            b = self.add_variable_input(
                "bias",
                zeros((1, self.out_channels, 1, 1)),
                x.dtype,
                replica_grouping=self.replica_grouping,
            )
            y = y + b
        return y

    @staticmethod
    def torch_mapping(
        variables: NamedTensors, nn_layer: Any, dtype: popxl.dtype = popxl.float32
    ) -> WeightsDict:
        """Map this layer's variables to the weights of a `torch.nn.Conv2d`."""
        weights = WeightsDict({variables.weight: to_numpy(nn_layer.weight, dtype)})
        if getattr(nn_layer, "bias", None) is not None:
            weights[variables.bias] = to_numpy(nn_layer.bias, dtype).reshape(1, -1, 1, 1)
        return weights
