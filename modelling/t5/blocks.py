"""The layers of T5's two stacks.

The variables of one are the same for every layer of the stack; `self_attention.relative_position`
belongs to the first one, and the others are given its value.
"""

from __future__ import annotations

from config.t5 import T5Config
from modelling.layers import Dropout, Groups, Layer
from modelling.t5.attention import CrossAttention, SelfAttention
from modelling.t5.feed_forward import FeedForwardLayer
from popxl import Tensor


class EncoderBlock(Layer):
    """An encoder layer: self-attention and feed-forward.

    Variables: those of `self_attention` and `feed_forward`.
    """

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        groups = Groups.current(config.execution.tensor_parallel)
        slices = config.execution.attention_serialisation
        self.dropout = Dropout.of(config.model)
        self.self_attention = SelfAttention(config, groups, causal=False, slices=slices)
        self.feed_forward = FeedForwardLayer(config, groups)

    def build(self, x: Tensor, mask: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> the same shape.

        Args:
            mask: int32 (batch, length), see `Packing`.
            seed: uint32 (2,) for dropout, the same on the replicas of a tensor-parallel group.
        """
        attention_seed, feed_forward_seed = self.dropout.seeds(seed, 2)
        x = self.self_attention(x, mask, attention_seed)
        return self.feed_forward(x, feed_forward_seed)


class DecoderBlock(Layer):
    """A decoder layer: causal self-attention, cross-attention and feed-forward.

    The few queries of a decoder are never cut into slices (`attention_serialisation`).

    Variables: those of `self_attention`, `cross_attention` and `feed_forward`.
    """

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        groups = Groups.current(config.execution.tensor_parallel)
        self.dropout = Dropout.of(config.model)
        self.self_attention = SelfAttention(config, groups, causal=True)
        self.cross_attention = CrossAttention(config, groups)
        self.feed_forward = FeedForwardLayer(config, groups)

    def build(self, x: Tensor, encoded: Tensor, mask: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (batch * examples of a sample, length, hidden) -> the same shape.

        Padding of x is at its end, where causality hides it, so x needs no mask.

        Args:
            encoded: the encoder's output, (batch, encoder length, hidden).
            mask: int32 (batch, encoder length), see `Packing`.
            seed: as for `EncoderBlock`.
        """
        self_seed, cross_seed, feed_forward_seed = self.dropout.seeds(seed, 3)
        x = self.self_attention(x, seed=self_seed)
        x = self.cross_attention(x, encoded, mask, cross_seed)
        return self.feed_forward(x, feed_forward_seed)
