"""The toy's layers."""

from __future__ import annotations

from config.toy import ToyConfig
from modelling.layers import Dropout, Layer, LMHeadLoss, RMSNorm
from popxl import Tensor, ops


class Block(Layer):
    """x + tanh(x weight). Variables: `weight` (hidden, hidden)."""

    def build(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        hidden = x.shape[-1]
        return x + ops.tanh(x @ self.weight("weight", (hidden, hidden), x.dtype))


class Head(LMHeadLoss):
    """The final norm, logits and the loss."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config, RMSNorm(1e-6), Dropout(), bias=False)
