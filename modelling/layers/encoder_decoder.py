"""Layers and contexts that all encoder-decoders share: contexts over whole samples,
attention to the encoder's output, and biases of positions that a stack's blocks share."""

from __future__ import annotations

from collections.abc import Sequence

from data.preference_samples import answers_per_example
from modelling.layers.attention import transpose_heads
from modelling.layers.context import BlockContext
from modelling.layers.embedding import Embeddings
from modelling.layers.linear import FusedLinear
from modelling.layers.module import Module
from modelling.layers.multi_head_attention import MultiHeadAttention
from modelling.layers.packing import Packing
from modelling.layers.run_config import current_run_config
from modelling.layers.wrapped import LayerWrapper
from popxl import Tensor

PaddingMask = tuple[Sequence[Tensor], Tensor | None]
"""Masks of padding: biases of the scores, or a number of keys for each sample."""


class PositionBias(Module):
    """Biases of attention scores by positions: `build(queries, keys)` for numbers of them returns
    float32, broadcasts to (batch, heads, queries, keys). Where it is shared, the first block of the
    stack has the variables."""


class StackContext(BlockContext):
    """The context of a stack's block.

    Args:
        seed: see `BlockContext`.
        bias: of positions, where it is at hand.
    """

    def __init__(self, seed: Tensor | None = None, bias: Tensor | None = None) -> None:
        super().__init__(seed=seed)
        self._bias = bias

    def position_bias(self, module: PositionBias, length: int) -> Tensor:
        """Biases of a module for this many queries and keys."""
        bias: Tensor = module(length, length) if self._bias is None else self._bias
        return bias

    def padding_mask(self, takes_lengths: bool) -> PaddingMask:
        """Masks of the padding of x: that of a decoder is at its end, where causality hides it.

        Args:
            takes_lengths: whether attention takes numbers of keys: a kernel adds one bias, not two.
        """
        return [], None


class EncoderContext(StackContext):
    """The context of the encoder's blocks.

    Args:
        mask: int32 (batch, length), see `Packing`.
    """

    def __init__(
        self, mask: Tensor, seed: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        super().__init__(seed, bias)
        self._mask, self._packing = mask, packing()

    def padding_mask(self, takes_lengths: bool) -> PaddingMask:
        if takes_lengths and self._packing.examples_per_sample == 1 and self._bias is None:
            return [], self._packing.lengths(self._mask)
        return [self._packing.encoder_bias(self._mask)], None


class DecoderContext(StackContext):
    """The context of the decoder's blocks.

    Args:
        encoded: the encoder's output, (batch, encoder length, hidden).
        mask: int32 (batch, encoder length), see `Packing`.

    Attributes:
        packing: of the sequences.
    """

    def __init__(self, encoded: Tensor, mask: Tensor, seed: Tensor | None = None) -> None:
        super().__init__(seed)
        self._encoded, self._mask, self.packing = encoded, mask, packing()

    def encoder_padding_mask(self, takes_lengths: bool, length: int) -> PaddingMask:
        """Masks of the encoder's padding and of other examples of the sample, like `padding_mask`.

        Args:
            length: queries of a sequence.
        """
        if takes_lengths and self.packing.examples_per_sample == 1:
            return [], self.packing.lengths(self._mask)
        return [self.packing.cross_bias(self._mask, length)], None

    def encoder_kv(self, attention: CrossAttention) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoder's output, (batch, heads, encoder length, head_dim)."""
        return attention.project_kv(self._encoded)


class CrossAttention(MultiHeadAttention):
    """Attention to the encoder's output, between the projections, of which subclasses declare that
    of keys and values as `kv`. The few queries of a decoder are never cut into slices."""

    kv: FusedLinear

    def attend_encoded(self, q: Tensor, ctx: DecoderContext) -> Tensor:
        """q: (batch, n * length, h * d), n sequences of a sample side by side, see
        `Packing.pack_sequences` -> the same shape."""
        length = self.layout.length(q) // ctx.packing.sequences_per_sample
        masks, lengths = ctx.encoder_padding_mask(bool(self.fused), length)
        k, v = ctx.encoder_kv(self)
        q = transpose_heads(self.split_heads(q))
        return self.attend_heads(q, k, v, ctx, masks, lengths=lengths)

    def project_kv(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoder's output: (batch, length, hidden) -> (batch, heads,
        length, head_dim) each."""
        k, v = (self.split_heads(t) for t in self.kv(self.groups.copy_to_tp(encoded)))
        return transpose_heads(k), transpose_heads(v)


class PackedEncoderEmbeddings(LayerWrapper):
    """The beginning of an encoder whose learned positions are those in each example."""

    def build(self, input_ids: Tensor, mask: Tensor, seed: Tensor | None = None) -> Tensor:
        """input_ids: int32 (batch, length) -> (batch, length, hidden).

        Args:
            mask: see `Packing`.
        """
        x: Tensor = self.layer(input_ids, seed, packing().positions(mask))
        return x


def with_packed_positions(embeddings: Embeddings) -> Embeddings | PackedEncoderEmbeddings:
    """The beginning of an encoder, which takes the mask as well if its positions depend on it."""
    depends = embeddings.has_positions and packing().examples_per_sample > 1
    return PackedEncoderEmbeddings(embeddings) if depends else embeddings


def packing() -> Packing:
    """The packing of the samples of the run that modules are made for."""
    config = current_run_config()
    return Packing.from_config(config, answers_per_example(config))
