"""Multi-head attention, between the projections.

Shapes: b samples, h heads on this replica, q queries, k keys, d features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import popxl_addons as addons
from modelling.layers.attention_step import AttentionStep
from modelling.layers.dropout import Dropout
from modelling.layers.sliced_attention import SlicedAttention
from popxl import Tensor, ops


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(b, s, h*d) -> (b, s, h, d)."""
    batch, length, features = x.shape
    return x.reshape((batch, length, heads, features // heads))


def heads_first(x: Tensor) -> Tensor:
    """(b, s, h, d) -> (b, h, s, d)."""
    return x.transpose((0, 2, 1, 3))


def merge_heads(x: Tensor) -> Tensor:
    """(b, h, s, d) -> (b, s, h*d)."""
    batch, heads, length, features = x.shape
    return x.transpose((0, 2, 1, 3)).reshape((batch, length, heads * features))


class Attention(addons.Module):
    """Attention of all queries at once, or of one slice of them after the other.

    Args:
        dropout: of the probabilities.
        scale: of the scores.
        slices: number of slices, see `SlicedAttention`; 1: all at once.
        differentiable: whether a gradient will be wanted.
    """

    def __init__(
        self,
        dropout: Dropout,
        scale: float = 1.0,
        slices: int = 1,
        differentiable: bool = True,
    ) -> None:
        super().__init__()
        self.slices = slices
        self.differentiable = differentiable
        self.step = AttentionStep(dropout, scale)
        self.sliced = SlicedAttention(self.step, slices)

    def build(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        biases: Sequence[Tensor] = (),
        seed: Tensor | None = None,
    ) -> Tensor:
        """Attend from all queries to all keys.

        Args:
            q: (b, h, q, d).
            k, v: (b, h, k, d).
            biases: float32, added to the scores (b, h, q, k); they broadcast.
            seed: for dropout.

        Returns:
            (b, h, q, d).
        """
        biases = tuple(biases)
        if self.differentiable:  # the gradient reads them again
            q, k, v = map(ops.materialise, (q, k, v))
        if self.slices == 1 or q.shape[2] == 1:  # a single query, in generation, is not cut
            return self.step(q, k, v, biases, seed)
        call = self.call_module(self.sliced, autodiff="auto" if self.differentiable else "none")
        return call(q, k, v, biases, seed)[0]
