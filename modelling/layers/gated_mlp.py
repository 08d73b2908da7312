"""Gated feed-forward layers (Shazeer, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable

from modelling.layers.block_context import BlockContext
from modelling.layers.dropout import NO_DROPOUT, Dropout
from modelling.layers.linear import FusedLinear, Linear
from modelling.layers.module import Module
from popxl import Tensor


class GatedMLP(Module):
    """Gated MLP: down_proj(dropout(act(gate_proj x) * up_proj x)), inner features sharded.

    Args:
        hidden_size, intermediate_size: numbers of features.
        act: of the gate.
        std: of the initial weights.
        bias: True if the projections have biases.
        dropout: of the inner features.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        act: Callable[[Tensor], Tensor],
        std: float,
        bias: bool = False,
        dropout: Dropout = NO_DROPOUT,
    ) -> None:
        super().__init__()
        self.act, self.dropout = act, dropout
        gate_up = {"gate_proj": std, "up_proj": std}
        self.gate_up = FusedLinear(hidden_size, intermediate_size, gate_up, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, shard="in", std=std, bias=bias)

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        """Computes the MLP: (..., hidden) -> the same shape."""
        gate, up = self.gate_up(self.groups.copy_to_tp(x))
        h = self.act(gate) * up
        if self.dropout.is_active:
            h = self.dropout(h, self.groups.tp_seed(ctx.next_seed()))
        return self.down_proj(h)
