"""BART: the post-norm encoder-decoder with learned positions (Lewis et al., arXiv:1910.13461).

After Vaswani et al. (arXiv:1706.03762), with GELU.

x is (batch, length, hidden), equal on all replicas of a tensor-parallel group; between `copy_to_tp`
and a `Linear` with `shard="in"` each replica has its heads or feed-forward features.
"""

from __future__ import annotations

import numpy as np

import popxl
from config.bart import BartConfig, BartModel
from modelling.bart.config_json import from_config_json, normalize_config_json, to_config_json
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
    activation,
    parameter,
)
from modelling.model_family import encoder_decoder_family
from popxl import Tensor, ops

EPSILON = 1e-5
"""Added to the variance in layer norms: a constant in transformers' BART."""

FIRST_POSITION = 2
"""Row of the first position: fairseq's tables have two unused rows before it."""


# ---- embeddings ---------------------------------------------------------------------------------
class BartPositions(Module):
    """Learned position embeddings."""

    def __init__(self, c: BartModel, hf_name: str) -> None:
        super().__init__(hf_name)
        rows = c.max_position_embeddings + FIRST_POSITION
        self.weight = parameter(rows, c.hidden_size, std=c.init_std)

    def build(self, positions: Tensor) -> Tensor:
        """positions: int32 (batch or 1, length) -> (batch or 1, length, hidden)."""
        return ops.gather(self.weight, positions + FIRST_POSITION)


class BartEmbeddings(Embeddings):
    """dropout(layernorm_embedding(tokens * scale + positions))."""

    has_positions = True

    def __init__(self, c: BartModel, stack: str) -> None:
        tokens = VocabularyEmbedding(c.init_std, "model.shared", is_shared=stack == "decoder")
        super().__init__(tokens, c.hidden_size**0.5 if c.scale_embedding else 1.0)
        self.embed_positions = BartPositions(c, f"model.{stack}.embed_positions")
        self.layernorm_embedding = LayerNorm(c.hidden_size, EPSILON)
        self.layernorm_embedding.hf_name = f"model.{stack}.layernorm_embedding"

    def build(
        self, input_ids: Tensor, seed: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """input_ids: int32 (batch, length) -> (batch, length, hidden).

        Args:
            seed: uint32 (2,) for dropout, equal on the replicas of a tensor-parallel group.
            positions: see `Embeddings`.
        """
        if positions is None:
            index = np.arange(input_ids.shape[1])[None]
            positions = popxl.constant(index, popxl.int32, "positions")
        x = self.tokens(self.layout.convert(input_ids))
        x = x if self.scale == 1 else x * self.scale
        x = x + self.layout.convert(self.embed_positions(positions))
        return self.dropout(self.layernorm_embedding(x), seed)


# ---- attention ----------------------------------------------------------------------------------
class BartAttention(MultiHeadAttention):
    """Self-attention, causal in the decoder."""

    def __init__(self, c: BartModel, heads: int, causal: bool) -> None:
        hidden, std = c.hidden_size, c.init_std
        spec = AttentionSpec((hidden // heads) ** -0.5, causal=causal)
        dropout = Dropout.from_model(c, c.attention_dropout)
        super().__init__(heads, spec, is_chunked=not causal, dropout=dropout)
        self.qkv = FusedLinear(hidden, hidden, {f"{n}_proj": std for n in "qkv"}, bias=True)
        self.out_proj = Linear(hidden, hidden, shard="in", std=std, bias=True)

    def build(self, x: Tensor, ctx: StackContext) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        q, k, v = (self.split_heads(t) for t in self.qkv(self.groups.copy_to_tp(x)))
        masks, lengths = ctx.padding_mask(bool(self.fused))
        return self.out_proj(self.attend(q, k, v, ctx, masks, lengths))


class BartCrossAttention(CrossAttention):
    """Cross-attention of the decoder to the encoder's output."""

    def __init__(self, c: BartModel, heads: int) -> None:
        hidden, std = c.hidden_size, c.init_std
        dropout = Dropout.from_model(c, c.attention_dropout)
        super().__init__(heads, AttentionSpec((hidden // heads) ** -0.5), dropout=dropout)
        self.q_proj = Linear(hidden, hidden, shard="out", std=std, bias=True)
        self.kv = FusedLinear(hidden, hidden, {f"{n}_proj": std for n in "kv"}, bias=True)
        self.out_proj = Linear(hidden, hidden, shard="in", std=std, bias=True)

    def build(self, x: Tensor, ctx: DecoderContext) -> Tensor:
        """x: (batch * sequences_per_sample, length, hidden) -> the same shape."""
        q = self.q_proj(self.groups.copy_to_tp(ctx.packing.pack_sequences(x)))
        return ctx.packing.unpack_sequences(self.out_proj(self.attend_encoded(q, ctx)))


# ---- layers -------------------------------------------------------------------------------------
class BartLayer(Module):
    """Base class of BART's encoder and decoder layers: self-attention and feed-forward modules.

    Args:
        heads: of attention.
        ffn_dim: features between fc1 and fc2.
        causal: True in the decoder.
    """

    def __init__(self, c: BartModel, heads: int, ffn_dim: int, causal: bool) -> None:
        super().__init__()
        hidden, std = c.hidden_size, c.init_std
        self.self_attn = BartAttention(c, heads, causal)
        self.self_attn_layer_norm = LayerNorm(hidden, EPSILON)
        self.act = activation(c.activation_function)
        self.drop = Dropout.from_model(c, c.activation_dropout)
        self.fc1 = Linear(hidden, ffn_dim, shard="out", std=std, bias=True)
        self.fc2 = Linear(ffn_dim, hidden, shard="in", std=std, bias=True)
        self.final_layer_norm = LayerNorm(hidden, EPSILON)

    def feed_forward(self, x: Tensor, ctx: StackContext) -> Tensor:
        """Computes fc2(dropout(act(fc1 x))): (batch, length, hidden) -> the same shape."""
        h = self.act(self.fc1(self.groups.copy_to_tp(x)))
        return self.fc2(self.drop(h, self.groups.tp_seed(ctx.next_seed())))


class BartEncoderLayer(BartLayer):
    """A BART encoder layer: post-norm self-attention and feed-forward."""

    def __init__(self, c: BartModel) -> None:
        super().__init__(c, c.encoder_attention_heads, c.encoder_ffn_dim, causal=False)

    def build(self, x: Tensor, ctx: StackContext) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        x = self.self_attn_layer_norm(ctx.add_residual(x, self.self_attn(x, ctx)))
        return self.final_layer_norm(ctx.add_residual(x, self.feed_forward(x, ctx)))


class BartDecoderLayer(BartLayer):
    """A BART decoder layer: post-norm causal self-attention, cross-attention, feed-forward."""

    def __init__(self, c: BartModel) -> None:
        super().__init__(c, c.decoder_attention_heads, c.decoder_ffn_dim, causal=True)
        self.encoder_attn = BartCrossAttention(c, c.decoder_attention_heads)
        self.encoder_attn_layer_norm = LayerNorm(c.hidden_size, EPSILON)

    def build(self, x: Tensor, ctx: DecoderContext) -> Tensor:
        """x: (batch * sequences_per_sample, length, hidden) -> the same shape."""
        x = self.self_attn_layer_norm(ctx.add_residual(x, self.self_attn(x, ctx)))
        x = self.encoder_attn_layer_norm(ctx.add_residual(x, self.encoder_attn(x, ctx)))
        return self.final_layer_norm(ctx.add_residual(x, self.feed_forward(x, ctx)))


# ---- the model ----------------------------------------------------------------------------------
def encoder_decoder_spec(config: BartConfig) -> EncoderDecoderSpec:
    """Returns the model specification of a BART configuration."""
    c = config.model

    def make_head() -> LMHeadLoss:
        tokens = VocabularyEmbedding(c.init_std, "model.shared", is_shared=True)
        return LMHeadLoss(None, "", c.init_std, tokens, bias="buffer")

    return EncoderDecoderSpec(
        embeddings=lambda: BartEmbeddings(c, "encoder"),
        encoder=BlockStack(c.encoder_layers, lambda _: BartEncoderLayer(c), "model.encoder.layers"),
        decoder_embeddings=lambda: BartEmbeddings(c, "decoder"),
        decoder=BlockStack(c.decoder_layers, lambda _: BartDecoderLayer(c), "model.decoder.layers"),
        head=make_head,
        hf_embedding_names=[f"model.{s}.embed_tokens.weight" for s in ("encoder", "decoder")],
    )


FAMILY = encoder_decoder_family(
    encoder_decoder_spec,
    to_config_json,
    from_config_json,
    normalize_config_json=normalize_config_json,
)
