"""T5Gemma: an encoder-decoder of Gemma 2's blocks (Zhang et al., arXiv:2504.06225).

Gemma 2: arXiv:2408.00118. Encoder and decoder can differ in size, and each has an embedding.

x is (batch, length, hidden), equal on all replicas of a tensor-parallel group; between `copy_to_tp`
and a `Linear` with `shard="in"` each replica has its heads or feed-forward features.
"""

from __future__ import annotations

import math

from config.llama import LayerType
from config.t5gemma import GemmaStack, T5GemmaConfig, T5GemmaModel
from modelling.encoder_decoder import BlockStack, EncoderDecoderSpec
from modelling.layers import (
    AttentionSpec,
    BlockContext,
    CrossAttention,
    DecoderContext,
    Dropout,
    Embeddings,
    EncoderFinalNorm,
    FusedLinear,
    Linear,
    LMHeadLoss,
    Module,
    MultiHeadAttention,
    RMSNorm,
    StackContext,
    VocabularyEmbedding,
    get_activation,
)
from modelling.llama.rotary import Rope
from modelling.model_family import encoder_decoder_family
from modelling.t5gemma.config_json import from_config_json, normalize_config_json, to_config_json
from popxl import Tensor


# ---- attention ----------------------------------------------------------------------------------
class T5GemmaSelfAttention(MultiHeadAttention):
    """Grouped-query self-attention with RoPE, causal in the decoder.

    An encoder's window reaches as far in both directions.
    """

    def __init__(self, c: T5GemmaModel, stack: GemmaStack, layer: LayerType, causal: bool) -> None:
        heads, kv_heads, std = (
            stack.num_attention_heads,
            stack.num_key_value_heads,
            c.initializer_range,
        )
        window = stack.sliding_window if causal else (stack.sliding_window, stack.sliding_window)
        spec = attention_spec(stack, causal, window if layer.is_sliding else None)
        dropout = Dropout.from_model_config(c, c.attention_dropout)
        super().__init__(heads, spec, kv_heads, is_chunked=not causal, dropout=dropout)
        hidden, inner = stack.hidden_size, heads * stack.head_dim
        kv = {"k_proj": std, "v_proj": std}
        self.q_proj = Linear(hidden, inner, shard="out", std=std)
        self.kv = FusedLinear(hidden, kv_heads * stack.head_dim, kv, max_shards=kv_heads)
        self.o_proj = Linear(inner, hidden, shard="in", std=std)
        self.rope = Rope(stack, layer)

    def build(self, x: Tensor, ctx: StackContext) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        x = self.groups.copy_to_tp(x)
        q, (k, v) = self.split_heads(self.q_proj(x)), map(self.split_kv_heads, self.kv(x))
        q, k = self.rope(q, k, ctx)
        masks, lengths = ctx.padding_mask(bool(self.fused))
        return self.o_proj(self.attend(q, k, v, ctx, masks, lengths))


class T5GemmaCrossAttention(CrossAttention):
    """Grouped-query attention to all of the encoder's output, without positions."""

    def __init__(self, c: T5GemmaModel) -> None:
        stack, std = c.decoder, c.initializer_range
        heads, kv_heads = stack.num_attention_heads, stack.num_key_value_heads
        dropout = Dropout.from_model_config(c, c.attention_dropout)
        super().__init__(heads, attention_spec(stack), kv_heads, dropout=dropout)
        hidden, inner, kv = (
            stack.hidden_size,
            heads * stack.head_dim,
            {"k_proj": std, "v_proj": std},
        )
        self.q_proj = Linear(hidden, inner, shard="out", std=std)
        self.kv = FusedLinear(
            c.encoder.hidden_size, kv_heads * stack.head_dim, kv, max_shards=kv_heads
        )
        self.o_proj = Linear(inner, hidden, shard="in", std=std)

    def build(self, x: Tensor, ctx: DecoderContext) -> Tensor:
        """x: (batch * sequences_per_sample, length, hidden) -> the same shape."""
        q = self.q_proj(self.groups.copy_to_tp(ctx.packing.pack_sequences(x)))
        return ctx.packing.unpack_sequences(self.o_proj(self.attend_encoded(q, ctx)))


def attention_spec(
    stack: GemmaStack, causal: bool = False, window: int | tuple[int, int] | None = None
) -> AttentionSpec:
    """Returns scale, soft cap, mask and window of a stack's attention scores."""
    scale, softcap = stack.query_pre_attn_scalar**-0.5, stack.attn_logit_softcapping
    return AttentionSpec(scale, softcap, causal, window)


# ---- layers -------------------------------------------------------------------------------------
class T5GemmaMLP(Module):
    """down_proj(dropout(act(gate_proj x) * up_proj x))."""

    def __init__(self, c: T5GemmaModel, stack: GemmaStack) -> None:
        super().__init__()
        hidden, inner, std = stack.hidden_size, stack.intermediate_size, c.initializer_range
        self.act, self.drop = get_activation(stack.hidden_activation), Dropout.from_model_config(c)
        self.gate_up = FusedLinear(hidden, inner, {"gate_proj": std, "up_proj": std})
        self.down_proj = Linear(inner, hidden, shard="in", std=std)

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        gate, up = self.gate_up(self.groups.copy_to_tp(x))
        h = self.drop(self.act(gate) * up, self.groups.tp_seed(ctx.next_seed()))
        return self.down_proj(h)


class T5GemmaEncoderLayer(Module):
    """Norms before and after self-attention, and before and after the feed-forward."""

    causal = False

    def __init__(self, c: T5GemmaModel, stack: GemmaStack, layer: LayerType) -> None:
        super().__init__()
        self.self_attn = T5GemmaSelfAttention(c, stack, layer, self.causal)
        self.pre_self_attn_layernorm = make_norm(stack)
        self.post_self_attn_layernorm = make_norm(stack)
        self.mlp = T5GemmaMLP(c, stack)
        self.pre_feedforward_layernorm = make_norm(stack)
        self.post_feedforward_layernorm = make_norm(stack)

    def build(self, x: Tensor, ctx: StackContext) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        return self.add_feed_forward(self.add_self_attention(x, ctx), ctx)

    def add_self_attention(self, x: Tensor, ctx: StackContext) -> Tensor:
        """Adds self-attention: (batch, length, hidden) -> the same shape."""
        y = self.self_attn(self.pre_self_attn_layernorm(x), ctx)
        return ctx.add_residual(x, self.post_self_attn_layernorm(y))

    def add_feed_forward(self, x: Tensor, ctx: StackContext) -> Tensor:
        """Adds the feed-forward: (batch, length, hidden) -> the same shape."""
        y = self.mlp(self.pre_feedforward_layernorm(x), ctx)
        return ctx.add_residual(x, self.post_feedforward_layernorm(y))


class T5GemmaDecoderLayer(T5GemmaEncoderLayer):
    """An encoder layer, but causal, with cross-attention in its middle."""

    causal = True

    def __init__(self, c: T5GemmaModel, stack: GemmaStack, layer: LayerType) -> None:
        super().__init__(c, stack, layer)
        self.cross_attn = T5GemmaCrossAttention(c)
        self.pre_cross_attn_layernorm = make_norm(stack)
        self.post_cross_attn_layernorm = make_norm(stack)

    def build(self, x: Tensor, ctx: DecoderContext) -> Tensor:  # type: ignore[override]
        """x: (batch * sequences_per_sample, length, hidden) -> the same shape."""
        x = self.add_self_attention(x, ctx)
        y = self.cross_attn(self.pre_cross_attn_layernorm(x), ctx)
        x = ctx.add_residual(x, self.post_cross_attn_layernorm(y))
        return self.add_feed_forward(x, ctx)


def make_norm(stack: GemmaStack) -> RMSNorm:
    """Builds an RMS norm over a stack's features, times 1 + weight."""
    return RMSNorm(stack.hidden_size, stack.rms_norm_eps, unit_offset=True)


# ---- the model ----------------------------------------------------------------------------------
def encoder_decoder_spec(config: T5GemmaConfig) -> EncoderDecoderSpec:
    """Returns the model specification of a T5Gemma configuration."""
    c = config.model

    def tokens(name: str, is_shared: bool = False) -> VocabularyEmbedding:
        hf_name, hidden = f"model.{name}.embed_tokens", c.stacks[name].hidden_size
        return VocabularyEmbedding(c.initializer_range, hf_name, is_shared, hidden_size=hidden)

    def embeddings(name: str) -> Embeddings:
        return Embeddings(tokens(name), math.sqrt(c.stacks[name].hidden_size))

    def blocks(name: str, layer: type[T5GemmaEncoderLayer]) -> BlockStack:
        stack = c.stacks[name]
        return BlockStack(
            stack.num_hidden_layers,
            lambda layer_type: layer(c, stack, layer_type),
            f"model.{name}.layers",
            stack.layers,
            stack.hidden_size,
        )

    return EncoderDecoderSpec(
        embeddings=lambda: embeddings("encoder"),
        encoder=blocks("encoder", T5GemmaEncoderLayer),
        encoder_head=lambda: EncoderFinalNorm(
            make_norm(c.encoder), "model.encoder.norm", Dropout.from_model_config(c)
        ),
        decoder_embeddings=lambda: embeddings("decoder"),
        decoder=blocks("decoder", T5GemmaDecoderLayer),
        head=lambda: LMHeadLoss(
            make_norm(c.decoder),
            "model.decoder.norm",
            c.initializer_range,
            tokens("decoder", is_shared=True) if c.tie_word_embeddings else None,
            Dropout.from_model_config(c),
            softcap=c.final_logit_softcapping,
            hf_linear="lm_head.out_proj",
        ),
        hf_embedding_names=[],
        has_decoder_tokens=True,
    )


FAMILY = encoder_decoder_family(
    encoder_decoder_spec,
    to_config_json,
    from_config_json,
    normalize_config_json=normalize_config_json,
)
