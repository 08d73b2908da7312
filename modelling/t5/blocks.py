"""The layers of T5's two stacks, and what the stacks end with.

Attention and feed-forward are norm, layer, residual. An attention layer is three steps, so that
generation can put key/value caches between them: project, attend, project out. `build` runs them
one after the other.

The variables of a block are the same for every layer of the stack;
`self_attention.relative_position` belongs to the first one, and the others are given its value.
"""

from __future__ import annotations

import popxl
from config.t5 import T5Config
from data.preferences import answers_of
from modelling.layers import (
    AttentionHeads,
    Dropout,
    FeedForward,
    FusedLinear,
    GatedFeedForward,
    Groups,
    Layer,
    Linear,
    LMHeadLoss,
    RMSNorm,
    add_residual,
    seed_adapters,
)
from modelling.t5.biases import Packing, RelativePosition
from popxl import Tensor


class AttentionLayer(AttentionHeads):
    """What self-attention and cross-attention have in common.

    Args:
        slices: see `Attention`.
    """

    def __init__(self, config: T5Config, groups: Groups, slices: int = 1) -> None:
        attention = config.model.attention
        super().__init__(config, groups, attention.heads, attention.d_kv, slices=slices)
        self.norm = RMSNorm(config.model.layer_norm_epsilon)
        self.packing = Packing.of(config, answers_of(config))

    @property
    def takes_lengths(self) -> bool:
        """Whether padding is told as numbers of tokens: a kernel adds one bias, not two."""
        return bool(self.fused) and self.packing.examples == 1

    def project_out(self, x: Tensor, heads: Tensor, seed: Tensor | None = None) -> Tensor:
        """Add the heads' results to the residual.

        Args:
            x: the layer's input, (batch, queries, hidden).
            heads: what `attend` returns.
        """
        y = self.groups.reduce_from_tp(self.merge(heads))
        return add_residual(x, self.dropout(y, seed))


class SelfAttention(AttentionLayer):
    """x + attention(norm(x)), with relative positions.

    Variables: `norm.weight`, `qkv.weight` (hidden, 3 * features on a replica),
    `relative_position.weight`, `output.weight`.

    Args:
        causal: whether positions see only themselves and those before.
    """

    def __init__(self, config: T5Config, groups: Groups, causal: bool, slices: int = 1) -> None:
        super().__init__(config, groups, slices)
        dtype = popxl.dtype.as_dtype(config.model.precision)
        self.qkv = FusedLinear(self.features, 3, groups.sharded, self.few_bits)
        self.relative_position = RelativePosition(config.model.attention, dtype, causal, groups)

    def build(self, x: Tensor, mask: Tensor | None = None, seed: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> the same shape.

        Args:
            mask: int32 (batch, length), see `Packing`; default: nothing is hidden.
        """
        attention_seed, output_seed = self.dropout.seeds(seed, 2)
        q, k, v = self.project_qkv(x)
        length = self.axes.length(x)
        biases, lengths = [self.relative_position(length, length)], None
        if mask is not None and self.takes_lengths:
            lengths = self.packing.lengths(mask)
        elif mask is not None:
            biases.append(self.packing.encoder_bias(mask))
        heads = self.attend(q, k, v, biases, attention_seed, lengths=lengths)
        return self.project_out(x, heads, output_seed)

    def project_qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of x, each (batch, heads, length, d_kv)."""
        return self.split(*self.qkv(self.groups.copy_to_tp(self.norm(x))))


class CrossAttention(AttentionLayer):
    """x + attention(norm(x), encoded), without position biases.

    Variables: `norm.weight`, `q.weight`, `kv.weight` (hidden, 2 * features on a replica),
    `output.weight`.
    """

    def __init__(self, config: T5Config, groups: Groups) -> None:
        super().__init__(config, groups)
        self.q = Linear(self.features, groups.sharded, few_bits=self.few_bits)
        self.kv = FusedLinear(self.features, 2, groups.sharded, self.few_bits)

    def build(self, x: Tensor, encoded: Tensor, mask: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (batch * examples of a sample, length, hidden) -> the same shape.

        Args:
            encoded: the encoder's output, (batch, encoder length, hidden).
            mask: int32 (batch, encoder length), see `Packing`.
        """
        attention_seed, output_seed = self.dropout.seeds(seed, 2)
        biases, lengths = [], None
        if self.takes_lengths:
            lengths = self.packing.lengths(mask)
        else:
            biases.append(self.packing.cross_bias(mask, self.axes.length(x)))
        x = self.packing.together(x)
        q = self.project_q(x)
        k, v = self.project_kv(encoded)
        heads = self.attend(q, k, v, biases, attention_seed, lengths=lengths)
        return self.packing.apart(self.project_out(x, heads, output_seed))

    def project_q(self, x: Tensor) -> Tensor:
        """Queries of x, (batch, heads, length, d_kv)."""
        return self.split(self.q(self.groups.copy_to_tp(self.norm(x))))[0]

    def project_kv(self, encoded: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of the encoder's output, each (batch, heads, encoder length, d_kv)."""
        return self.split(*self.kv(self.groups.copy_to_tp(encoded)))


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
            model.few_bits_in_layers,
            model.activation,
            dropout=self.dropout,
            scale=model.scale_ff,
        )

    def build(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        inner_seed, output_seed = self.dropout.seeds(seed, 2)
        y = self.maps.whole(self.norm(x), inner_seed)
        return add_residual(x, self.dropout(y, output_seed))


class EncoderBlock(Layer):
    """An encoder layer: self-attention and feed-forward.

    Variables: those of `self_attention` and `feed_forward`.
    """

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        groups = Groups.current(config.execution.tensor_parallel)
        slices = config.execution.attention_slices
        self.dropout = Dropout.of(config.model)
        self.self_attention = SelfAttention(config, groups, causal=False, slices=slices)
        self.feed_forward = FeedForwardLayer(config, groups)

    def build(self, x: Tensor, mask: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> the same shape.

        Args:
            mask: int32 (batch, length), see `Packing`.
            seed: uint32 (2,) for dropout, the same on the replicas of a tensor-parallel group.
        """
        seed_adapters(self, seed)
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
        seed_adapters(self, seed)
        self_seed, cross_seed, feed_forward_seed = self.dropout.seeds(seed, 3)
        x = self.self_attention(x, seed=self_seed)
        x = self.cross_attention(x, encoded, mask, cross_seed)
        return self.feed_forward(x, feed_forward_seed)


class EncoderFinalNorm(Layer):
    """The end of the encoder: norm and dropout.

    Variables: `norm.weight`.
    """

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.dropout = Dropout.of(config.model)
        self.norm = RMSNorm(config.model.layer_norm_epsilon)

    def build(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        return self.dropout(self.norm(x), seed)


class DecoderHead(LMHeadLoss):
    """The end of the decoder, the logits (without a bias) and the loss."""

    def __init__(self, config: T5Config) -> None:
        model = config.model
        super().__init__(
            config,
            RMSNorm(model.layer_norm_epsilon),
            Dropout.of(model),
            bias=False,
            tied=model.embedding.tied,
            scale=model.hidden_size**-0.5 if model.scaled_head else 1.0,
        )
