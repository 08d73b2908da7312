"""BART (Lewis et al., arXiv:1910.13461), mBART, M2M100 and NLLB, Marian, Pegasus.

The encoder-decoder of Vaswani et al. (arXiv:1706.03762); `ARCHITECTURES` says how they differ.

x is (batch, length, hidden), equal on all replicas of a tensor-parallel group; between `copy_to_tp`
and a `Linear` with `shard="in"` each replica has its heads or feed-forward features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import popxl
from config.bart import BartConfig, BartModel
from modelling.bart.architectures import ARCHITECTURES
from modelling.encoder_decoder import BlockStack, EncoderDecoderSpec
from modelling.layers import (
    AttentionSpec,
    CrossAttention,
    DecoderContext,
    Dropout,
    Embeddings,
    FusedLinear,
    LayerNorm,
    Linear,
    LMHeadLoss,
    Module,
    MultiHeadAttention,
    StackContext,
    VocabularyEmbedding,
    cast_if_needed,
    get_activation,
    parameter,
)
from modelling.layers.encoder_decoder import EncoderFinalNorm
from modelling.layers.lm_head import Bias
from modelling.layers.module import fused_parameter
from modelling.model_family import encoder_decoder_family
from modelling.weights.weight_mapping import Weight
from popxl import Tensor, ops

STACKS = ("encoder", "decoder")

EPSILON = 1e-5
"""Added to the variance in layer norms: a constant in transformers' classes."""

FIRST_POSITION = 2
"""Row of the first position: fairseq's tables have two unused rows before it."""


# ---- positions ----------------------------------------------------------------------------------
class LearnedPositions(Module):
    """Learned position embeddings."""

    def __init__(self, c: BartModel, hf_name: str) -> None:
        super().__init__(hf_name)
        rows = c.max_position_embeddings + FIRST_POSITION
        self.weight = parameter(rows, c.hidden_size, std=c.init_std)

    def build(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Embeds positions: int32 (batch or 1, length) -> (batch or 1, length, hidden)."""
        return ops.gather(self.weight, positions + FIRST_POSITION)


@dataclass(frozen=True)
class SinusoidalWeight(Weight):
    """Position embeddings of Vaswani et al.: the sines of all features, then the cosines."""

    def init_values(self, seed: int) -> np.ndarray:
        rows, features = self.shape
        exponents = 2 * (np.arange(features) // 2) / features
        angles = np.arange(rows)[:, None] / 10000**exponents
        waves = np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], axis=1)
        return waves.astype(np.float32)


class StoredPositions(Module):
    """Sinusoidal position embeddings that files have, or lack, and no step changes."""

    def __init__(self, c: BartModel, hf_name: str) -> None:
        super().__init__(hf_name)
        table = SinusoidalWeight("weight", (c.max_position_embeddings, c.hidden_size))
        self.weight = fused_parameter([table], is_buffer=True)

    def build(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Embeds positions: int32 (batch or 1, length) -> (batch or 1, length, hidden)."""
        return ops.gather(self.weight, positions)


class ComputedPositions(Module):
    """Sinusoidal position embeddings of M2M100: the first is that of pad_token_id + 1.

    Padding tokens have zeros.
    """

    def __init__(self, c: BartModel, hf_name: str) -> None:
        super().__init__(hf_name)
        self.pad, count = c.pad_token_id, c.hidden_size // 2
        exponents = np.arange(count, dtype=np.float32) * np.float32(-np.log(10000) / (count - 1))
        self.rates = np.exp(exponents)

    def build(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Embeds positions of tokens: int32 (batch or 1, length) -> (batch, length, hidden)."""
        rows = cast_if_needed(positions + (self.pad + 1), popxl.float32).reshape(
            (*positions.shape, 1)
        )
        angles = rows * popxl.constant(self.rates, popxl.float32, "rates")
        x = ops.concat([ops.sin(angles), ops.cos(angles)], -1)
        return cast_if_needed(ops.where(is_token(input_ids, self.pad), x, x * 0.0), self.dtype)


POSITIONS = {"learned": LearnedPositions, "stored": StoredPositions, "computed": ComputedPositions}


def is_token(input_ids: Tensor, pad: int) -> Tensor:
    """True for tokens other than padding: int32 (batch, length) -> bool (batch, length, 1)."""
    is_pad = ops.equal(input_ids, popxl.constant(pad, popxl.int32, "pad"))
    return ops.logical_not(is_pad).reshape((*input_ids.shape, 1))


# ---- embeddings ---------------------------------------------------------------------------------
def vocabulary(c: BartModel, stack: str, is_shared: bool = False) -> VocabularyEmbedding:
    """Returns the token embedding of a stack: one for both, or one for each.

    Args:
        is_shared: True if it is the decoder's, and the head's.
    """
    if c.decoder_vocab_size is None:
        return VocabularyEmbedding(c.init_std, "model.shared", is_shared or stack == "decoder")
    rows = c.decoder_vocab_size if stack == "decoder" else c.vocab_size
    return VocabularyEmbedding(c.init_std, f"model.{stack}.embed_tokens", is_shared, rows)


class BartEmbeddings(Embeddings):
    """Embeddings: dropout(layernorm_embedding(tokens * scale + positions)); norm optional."""

    has_positions = True

    def __init__(self, c: BartModel, stack: str) -> None:
        super().__init__(vocabulary(c, stack), c.hidden_size**0.5 if c.scale_embedding else 1.0)
        architecture = ARCHITECTURES[c.model_type]
        positions = POSITIONS[architecture.positions]
        self.embed_positions = positions(c, f"model.{stack}.embed_positions")
        self.pad, self.reads_padding = c.pad_token_id, c.start_token_id == c.pad_token_id
        self.has_norm = architecture.has_embedding_norm
        if self.has_norm:
            self.layernorm_embedding = LayerNorm(c.hidden_size, EPSILON)
            self.layernorm_embedding.hf_name = f"model.{stack}.layernorm_embedding"

    def build(
        self, input_ids: Tensor, seed: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Embeds tokens: int32 (batch, length) -> (batch, length, hidden).

        Args:
            seed: uint32 (2,) for dropout, equal on the replicas of a tensor-parallel group.
            positions: see `Embeddings`.
        """
        if positions is None:
            index = np.arange(input_ids.shape[1])[None]
            positions = popxl.constant(index, popxl.int32, "positions")
        local_ids = self.layout.transpose_if_sequence_first(input_ids)
        x = self.tokens(local_ids)
        if self.reads_padding:  # whose embedding is trained as a row of the head alone
            x = ops.where(is_token(local_ids, self.pad), x, ops.detach(x))
        x = x if self.scale == 1 else x * self.scale
        x = x + self.layout.transpose_if_sequence_first(self.embed_positions(input_ids, positions))
        return self.dropout(self.layernorm_embedding(x) if self.has_norm else x, seed)


# ---- attention ----------------------------------------------------------------------------------
class BartAttention(MultiHeadAttention):
    """Self-attention, causal in the decoder."""

    def __init__(self, c: BartModel, heads: int, causal: bool) -> None:
        hidden, std = c.hidden_size, c.init_std
        spec = AttentionSpec((hidden // heads) ** -0.5, causal=causal)
        dropout = Dropout.from_model_config(c, c.attention_dropout)
        super().__init__(heads, spec, is_chunked=not causal, dropout=dropout)
        self.qkv = FusedLinear(hidden, hidden, {f"{n}_proj": std for n in "qkv"}, bias=True)
        self.out_proj = Linear(hidden, hidden, shard="in", std=std, bias=True)

    def build(self, x: Tensor, ctx: StackContext) -> Tensor:
        """Computes self-attention: (batch, length, hidden) -> the same shape."""
        q, k, v = (self.split_heads(t) for t in self.qkv(self.groups.copy_to_tp(x)))
        masks, lengths = ctx.padding_mask(bool(self.fused))
        return self.out_proj(self.attend(q, k, v, ctx, masks, lengths))


class BartCrossAttention(CrossAttention):
    """Cross-attention of the decoder to the encoder's output."""

    def __init__(self, c: BartModel, heads: int) -> None:
        hidden, std = c.hidden_size, c.init_std
        dropout = Dropout.from_model_config(c, c.attention_dropout)
        super().__init__(heads, AttentionSpec((hidden // heads) ** -0.5), dropout=dropout)
        self.q_proj = Linear(hidden, hidden, shard="out", std=std, bias=True)
        self.kv = FusedLinear(hidden, hidden, {f"{n}_proj": std for n in "kv"}, bias=True)
        self.out_proj = Linear(hidden, hidden, shard="in", std=std, bias=True)

    def build(self, x: Tensor, ctx: DecoderContext) -> Tensor:
        """Cross-attends: (batch * sequences_per_sample, length, hidden) -> the same shape."""
        q = self.q_proj(self.groups.copy_to_tp(ctx.packing.pack_sequences(x)))
        return ctx.packing.unpack_sequences(self.out_proj(self.attend_encoded(q, ctx)))


# ---- layers -------------------------------------------------------------------------------------
class BartLayer(Module):
    """Base class of encoder and decoder layers: self-attention and feed-forward modules.

    Args:
        heads: of attention.
        ffn_dim: features between fc1 and fc2.
        causal: True in the decoder.
    """

    def __init__(self, c: BartModel, heads: int, ffn_dim: int, causal: bool) -> None:
        super().__init__()
        hidden, std = c.hidden_size, c.init_std
        self.is_pre_norm = ARCHITECTURES[c.model_type].is_pre_norm
        self.self_attn = BartAttention(c, heads, causal)
        self.self_attn_layer_norm = LayerNorm(hidden, EPSILON)
        self.act = get_activation(c.activation_function)
        self.drop = Dropout.from_model_config(c, c.activation_dropout)
        self.fc1 = Linear(hidden, ffn_dim, shard="out", std=std, bias=True)
        self.fc2 = Linear(ffn_dim, hidden, shard="in", std=std, bias=True)
        self.final_layer_norm = LayerNorm(hidden, EPSILON)

    def feed_forward(self, x: Tensor, ctx: StackContext) -> Tensor:
        """Computes fc2(dropout(act(fc1 x))): (batch, length, hidden) -> the same shape."""
        h = self.act(self.fc1(self.groups.copy_to_tp(x)))
        return self.fc2(self.drop(h, self.groups.tp_seed(ctx.next_seed())))

    def add_branch(
        self, x: Tensor, branch: Callable[[Tensor, Any], Tensor], norm: Module, ctx: StackContext
    ) -> Tensor:
        """Computes x + branch(norm(x)), or norm(x + branch(x)) in types with post-norm."""
        if self.is_pre_norm:
            return ctx.add_residual(x, branch(norm(x), ctx))
        y: Tensor = norm(ctx.add_residual(x, branch(x, ctx)))
        return y


class BartEncoderLayer(BartLayer):
    """An encoder layer: self-attention and feed-forward."""

    def __init__(self, c: BartModel) -> None:
        super().__init__(c, c.encoder_attention_heads, c.encoder_ffn_dim, causal=False)

    def build(self, x: Tensor, ctx: StackContext) -> Tensor:
        """Runs the layer: (batch, length, hidden) -> the same shape."""
        x = self.add_branch(x, self.self_attn, self.self_attn_layer_norm, ctx)
        return self.add_branch(x, self.feed_forward, self.final_layer_norm, ctx)


class BartDecoderLayer(BartLayer):
    """A decoder layer: causal self-attention, cross-attention, feed-forward."""

    def __init__(self, c: BartModel) -> None:
        super().__init__(c, c.decoder_attention_heads, c.decoder_ffn_dim, causal=True)
        self.encoder_attn = BartCrossAttention(c, c.decoder_attention_heads)
        self.encoder_attn_layer_norm = LayerNorm(c.hidden_size, EPSILON)

    def build(self, x: Tensor, ctx: DecoderContext) -> Tensor:
        """Runs the layer: (batch * sequences_per_sample, length, hidden) -> the same shape."""
        x = self.add_branch(x, self.self_attn, self.self_attn_layer_norm, ctx)
        x = self.add_branch(x, self.encoder_attn, self.encoder_attn_layer_norm, ctx)
        return self.add_branch(x, self.feed_forward, self.final_layer_norm, ctx)


# ---- the model ----------------------------------------------------------------------------------
def encoder_decoder_spec(config: BartConfig) -> EncoderDecoderSpec:
    """Returns the model specification of a BART configuration."""
    c, architecture = config.model, ARCHITECTURES[config.model.model_type]
    is_pre_norm, has_two = architecture.is_pre_norm, c.decoder_vocab_size is not None

    def encoder_head() -> EncoderFinalNorm:
        return EncoderFinalNorm(LayerNorm(c.hidden_size, EPSILON), "model.encoder.layer_norm")

    def make_head() -> LMHeadLoss:
        tokens = vocabulary(c, "decoder", is_shared=True)
        norm = LayerNorm(c.hidden_size, EPSILON) if is_pre_norm else None
        bias: Bias | None = "buffer" if architecture.has_logit_bias else None
        return LMHeadLoss(norm, "model.decoder.layer_norm", c.init_std, tokens, bias=bias)

    return EncoderDecoderSpec(
        embeddings=lambda: BartEmbeddings(c, "encoder"),
        encoder=BlockStack(c.encoder_layers, lambda _: BartEncoderLayer(c), "model.encoder.layers"),
        encoder_head=encoder_head if is_pre_norm else None,
        decoder_embeddings=(
            None if architecture.positions == "computed" else lambda: BartEmbeddings(c, "decoder")
        ),
        decoder=BlockStack(c.decoder_layers, lambda _: BartDecoderLayer(c), "model.decoder.layers"),
        head=make_head,
        has_decoder_tokens=has_two,
        hf_embedding_names=[] if has_two else [f"model.{s}.embed_tokens.weight" for s in STACKS],
    )


FAMILY = encoder_decoder_family(
    encoder_decoder_spec,
    "modelling.bart.config_json",
)
