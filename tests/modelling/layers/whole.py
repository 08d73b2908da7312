"""Layers outside of a sharded computation."""

from __future__ import annotations

import popxl_addons as addons
from modelling.layers import (
    GatedFeedForward,
    Groups,
)
from popxl import Tensor


class WholeFeedForward(addons.Module):
    """A gated feed-forward outside of a sharded computation."""

    def __init__(self, groups: Groups, hidden: int, inner: int, scale: float) -> None:
        super().__init__()
        self.gated = GatedFeedForward(hidden, inner, groups, scale=scale)

    def build(self, x: Tensor) -> Tensor:
        return self.gated.whole(x)
