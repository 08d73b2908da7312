"""T5's feed-forward layer: norm, feed-forward, residual."""

from __future__ import annotations

from config.t5 import T5Config
from modelling.layers import (
    Dropout,
    FeedForward,
    GatedFeedForward,
    Groups,
    Layer,
    RMSNorm,
    add_residual,
)
from popxl import Tensor


class FeedForwardLayer(Layer):
    """x + feed_forward(norm(x)).

    Variables: `norm.weight`, `maps.wi.weight`, `maps.wo.weight`, see `FeedForward` and
    `GatedFeedForward`.
    """

    def __init__(self, config: T5Config, groups: Groups) -> None:
        super().__init__()
        model = config.model
        self.dropout = Dropout.of(model)
        self.norm = RMSNorm(model.layer_norm_epsilon)
        kind = GatedFeedForward if model.gated else FeedForward
        self.maps = kind(
            model.hidden_size,
            model.d_ff,
            groups,
            model.weight_group_size,
            model.activation,
            dropout=self.dropout,
            scale=model.scale_ff,
        )

    def build(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        inner_seed, output_seed = self.dropout.seeds(seed, 2)
        y = self.maps.whole(self.norm(x), inner_seed)
        return add_residual(x, self.dropout(y, output_seed))
