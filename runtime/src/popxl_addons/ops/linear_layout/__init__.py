"""Tile layout hint, without effect on XLA."""

from popxl_addons.ops.linear_layout.linear_layout import linear_layout as linear_layout
