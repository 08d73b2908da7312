"""Layers."""

from popxl_addons.layers.conv import Conv2D as Conv2D
from popxl_addons.layers.embedding import Embedding as Embedding
from popxl_addons.layers.group_norm import GroupNorm as GroupNorm
from popxl_addons.layers.layer_norm import LayerNorm as LayerNorm
from popxl_addons.layers.linear import Linear as Linear
