"""Layers as modules: linear, convolution, embedding, norms."""

from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from popxl import ReplicaGrouping as ReplicaGrouping
    from popxl import ops as ops
    from popxl.ops.convolution import PadType as PadType
    from popxl.utils import to_numpy as to_numpy
    from popxl_addons.layers.conv import Conv2D as Conv2D
    from popxl_addons.layers.embedding import MULTISLICE_MAGIC_NUMBER as MULTISLICE_MAGIC_NUMBER
    from popxl_addons.layers.embedding import Embedding as Embedding
    from popxl_addons.layers.group_norm import GroupNorm as GroupNorm
    from popxl_addons.layers.layer_norm import LayerNorm as LayerNorm
    from popxl_addons.layers.linear import Linear as Linear
    from popxl_addons.layers.linear_fp8 import LinearFP8 as LinearFP8
    from popxl_addons.named_tensors import NamedTensors as NamedTensors
    from popxl_addons.utils import WeightsDict as WeightsDict
else:
    lazy_exports(__name__)
