"""Contexts and layers of encoder-decoders: padding masks, cross-attention, position biases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from modelling.layers.attention import transpose_heads
from modelling.layers.block_context import BlockContext
from modelling.layers.dropout import NO_DROPOUT, Dropout
from modelling.layers.embedding import Embeddings
from modelling.layers.layer_wrapper import LayerWrapper
from modelling.layers.linear import FusedLinear
from modelling.layers.module import Module
from modelling.layers.multi_head_attention import MultiHeadAttention
from modelling.layers.packing import Packing
from modelling.layers.run_config import current_run_config
from popxl import Tensor

if TYPE_CHECKING:
    from modelling.layers.rotary import RopeTables

PaddingMask = tuple[Sequence[Tensor], Tensor | None]
"""Biases of the scores, and the number of keys of each sample; padding is masked by one of them."""


class PositionBias(Module):
    """Interface of modules that compute biases of attention scores by position.

    `build(queries, keys)` takes numbers of positions and returns float32 that broadcasts to (batch,
    heads, queries, keys). If a stack's blocks share it, the first block has the variables; else
    each block has its own, of which generation calls `bias_of_query`.
    """

    def bias_of_query(self, position: Tensor, keys: int) -> Tensor:
        """Returns the bias of one query, position int32 scalar: (1, heads, 1, keys)."""
        raise NotImplementedError


class StackContext(BlockContext):
    """Interface: inputs besides x of an encoder or decoder block.

    Args:
        seed: see `BlockContext`.
        bias: the position bias, if it is computed already.
    """

    def __init__(self, seed: Tensor | None = None, bias: Tensor | None = None) -> None:
        super().__init__(seed=seed)
        self._bias = bias

    def position_bias(self, module: PositionBias, length: int) -> Tensor:
        """Returns the position bias of attention scores for `length` queries and keys."""
        bias: Tensor = module(length, length) if self._bias is None else self._bias
        return bias

    def padding_mask(self, takes_lengths: bool) -> PaddingMask:
        """Returns the mask of padding in x; None for the decoder.

        The decoder's padding is at the end, which the causal mask hides.

        Args:
            takes_lengths: True if attention can take numbers of keys: a kernel adds one bias, not
                two.
        """
        return [], None


class EncoderContext(StackContext):
    """Inputs besides x of an encoder block.

    Args:
        mask: int32 (batch, length), see `Packing`.
    """

    def __init__(
        self, mask: Tensor, seed: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        super().__init__(seed, bias)
        self._mask, self._packing = mask, current_packing()

    def rope_tables(self, make_tables: Callable[[int], RopeTables], length: int) -> RopeTables:
        tables = make_tables(length)
        if self._packing.examples_per_sample == 1:
            return tables
        from modelling.layers.rotary import gather_rope_tables

        return gather_rope_tables(tables, self._packing.position_ids(self._mask))

    def padding_mask(self, takes_lengths: bool) -> PaddingMask:
        if takes_lengths and self._packing.examples_per_sample == 1 and self._bias is None:
            return [], self._packing.sequence_lengths(self._mask)
        return [self._packing.encoder_attention_bias(self._mask)], None


class DecoderContext(StackContext):
    """Inputs besides x of a decoder block.

    Args:
        encoded: the encoder's output, (batch, encoder length, hidden).
        mask: int32 (batch, encoder length), see `Packing`.

    Attributes:
        packing: of the decoder sequences.
    """

    def __init__(self, encoded: Tensor, mask: Tensor, seed: Tensor | None = None) -> None:
        super().__init__(seed)
        self._encoded, self._mask, self.packing = encoded, mask, current_packing()

    def encoder_padding_mask(self, takes_lengths: bool, length: int) -> PaddingMask:
        """Returns the cross-attention mask of encoder padding and of the sample's other examples.

        Args:
            takes_lengths: see `padding_mask`.
            length: queries of a sequence.
        """
        if takes_lengths and self.packing.examples_per_sample == 1:
            return [], self.packing.sequence_lengths(self._mask)
        return [self.packing.cross_attention_bias(self._mask, length)], None

    def encoder_kv(self, attention: CrossAttention) -> tuple[Tensor, Tensor]:
        """Returns encoder K and V: (batch, heads, encoder length, head_dim) each."""
        return attention.project_kv(self._encoded)


class CrossAttention(MultiHeadAttention):
    """Attention to the encoder's output; subclasses declare the projection `kv`.

    A decoder has few queries, so they are never chunked.
    """

    kv: FusedLinear

    def attend_encoded(self, q: Tensor, ctx: DecoderContext) -> Tensor:
        """Attends to the encoder's output: q (batch, n * length, h * d) -> the same shape.

        The n sequences of a sample are joined by `Packing.pack_sequences`.
        """
        length = self.layout.sequence_length(q) // ctx.packing.sequences_per_sample
        masks, lengths = ctx.encoder_padding_mask(bool(self.fused), length)
        k, v = ctx.encoder_kv(self)
        q = transpose_heads(self.split_heads(q))
        return self.attend_heads(q, k, v, ctx, masks, lengths=lengths)

    def project_kv(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Projects (batch, length, hidden) to K and V: (batch, heads, length, head_dim) each."""
        k, v = (self.split_kv_heads(t) for t in self.kv(self.groups.copy_to_tp(encoded)))
        return transpose_heads(k), transpose_heads(v)


class EncoderFinalNorm(Module):
    """The norm after the encoder's last block: dropout(norm(x)).

    Args:
        hf_name: Hugging Face's path of the norm.
    """

    def __init__(self, norm: Module, hf_name: str, dropout: Dropout = NO_DROPOUT) -> None:
        super().__init__()
        self.dropout, self.norm = dropout, norm
        self.norm.hf_name = hf_name

    def build(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """Normalizes x, with dropout: (batch, length, hidden) -> the same shape."""
        return self.dropout(self.norm(x), seed)


class PackedEncoderEmbeddings(LayerWrapper):
    """Encoder embeddings whose learned positions restart at each example of a packed sample."""

    def build(self, input_ids: Tensor, mask: Tensor, seed: Tensor | None = None) -> Tensor:
        """Embeds packed tokens: int32 (batch, length) -> (batch, length, hidden).

        Args:
            mask: int32 (batch, length), see `Packing`.
        """
        x: Tensor = self.layer(input_ids, seed, current_packing().position_ids(mask))
        return x


def with_packed_positions(embeddings: Embeddings) -> Embeddings | PackedEncoderEmbeddings:
    """Wraps encoder embeddings that depend on positions, so that they also take the mask."""
    needs_mask = embeddings.has_positions and current_packing().examples_per_sample > 1
    return PackedEncoderEmbeddings(embeddings) if needs_mask else embeddings


def current_packing() -> Packing:
    """Returns how the current run configuration packs examples into samples."""
    config = current_run_config()
    return Packing.from_config(config, config.answers_per_example)
