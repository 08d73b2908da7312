"""T5Gemma: an encoder-decoder of Gemma's blocks (Zhang et al., arXiv:2504.06225).

T5Gemma has those of Gemma 2 (arXiv:2408.00118): encoder and decoder can differ in size, and each
has an embedding. The text part of T5Gemma 2 (arXiv:2512.14856) has those of Gemma 3
(arXiv:2503.19786): one embedding, and in the decoder one attention to its own and the encoder's
keys.

x is (batch, length, hidden), equal on all replicas of a tensor-parallel group; between `copy_to_tp`
and a `Linear` with `shard="in"` each replica has its heads or feed-forward features.
"""

from __future__ import annotations

import math

import numpy as np

import popxl
from config.llama import LayerType
from config.t5gemma import GemmaStack, T5GemmaConfig, T5GemmaModel
from modelling.encoder_decoder import BlockStack, EncoderDecoderSpec
from modelling.layers import (
    AttentionSpec,
    CrossAttention,
    DecoderContext,
    Dropout,
    Embeddings,
    EncoderFinalNorm,
    FusedLinear,
    GatedMLP,
    Linear,
    LMHeadLoss,
    Module,
    MultiHeadAttention,
    RMSNorm,
    StackContext,
    VocabularyEmbedding,
    get_activation,
    parameter,
)
from modelling.layers.attention import qk_ids_in_order, transpose_heads
from modelling.layers.masking import causal_bias, segment_bias
from modelling.llama.rotary import Rope
from modelling.model_family import encoder_decoder_family
from modelling.weights.hf_tensor_names import HfTensorNames
from popxl import Tensor, ops


# ---- attention ----------------------------------------------------------------------------------
class GemmaProjections(MultiHeadAttention):
    """Projections, norms of heads and rotary positions of self-attention."""

    def add_projections(self, c: T5GemmaModel, stack: GemmaStack, layer: LayerType) -> None:
        """Adds the submodules; T5Gemma 2 has norms of queries and keys."""
        hidden = stack.hidden_size
        inner = stack.num_attention_heads * stack.head_dim
        std = c.initializer_range
        kv_heads, kv = stack.num_key_value_heads, {"k_proj": std, "v_proj": std}
        self.q_proj = Linear(hidden, inner, shard="out", std=std)
        self.kv = FusedLinear(hidden, kv_heads * stack.head_dim, kv, max_shards=kv_heads)
        self.o_proj = Linear(inner, hidden, shard="in", std=std)
        self.rope, self.has_norms = Rope(stack, layer), c.is_merged
        if self.has_norms:
            self.q_norm, self.k_norm = make_head_norm(stack), make_head_norm(stack)

    def project(self, x: Tensor, ctx: StackContext) -> tuple[Tensor, Tensor, Tensor]:
        """Computes queries (b, n, h, d), keys and values (b, n, g, d) of x (b, n, hidden)."""
        x = self.groups.copy_to_tp(x)
        q, (k, v) = self.split_heads(self.q_proj(x)), map(self.split_kv_heads, self.kv(x))
        if self.has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        return *self.rope(q, k, ctx), v


class T5GemmaSelfAttention(GemmaProjections):
    """Grouped-query self-attention with RoPE, causal in the decoder.

    An encoder's window reaches in both directions.
    """

    def __init__(self, c: T5GemmaModel, stack: GemmaStack, layer: LayerType, causal: bool) -> None:
        heads, kv_heads = stack.num_attention_heads, stack.num_key_value_heads
        window = stack.sliding_window
        both_sides = ((window + 1) // 2 - 1, window // 2) if c.is_merged else (window, window)
        seen = window if causal else both_sides
        spec = attention_spec(stack, causal, seen if layer.is_sliding else None)
        dropout = Dropout.from_model_config(c, c.attention_dropout)
        super().__init__(heads, spec, kv_heads, is_chunked=not causal, dropout=dropout)
        self.add_projections(c, stack, layer)

    def build(self, x: Tensor, ctx: StackContext) -> Tensor:
        """Computes self-attention: (batch, length, hidden) -> the same shape."""
        q, k, v = self.project(x, ctx)
        masks, lengths = ctx.padding_mask(bool(self.fused))
        return self.o_proj(self.attend(q, k, v, ctx, masks, lengths))


class T5GemmaCrossAttention(CrossAttention):
    """Grouped-query attention to all of the encoder's output, without positions."""

    def __init__(self, c: T5GemmaModel) -> None:
        stack, std = c.decoder, c.initializer_range
        heads, kv_heads = stack.num_attention_heads, stack.num_key_value_heads
        dropout = Dropout.from_model_config(c, c.attention_dropout)
        super().__init__(heads, attention_spec(stack), kv_heads, dropout=dropout)
        hidden = stack.hidden_size
        inner = heads * stack.head_dim
        kv = {"k_proj": std, "v_proj": std}
        self.q_proj = Linear(hidden, inner, shard="out", std=std)
        self.kv = FusedLinear(
            c.encoder.hidden_size, kv_heads * stack.head_dim, kv, max_shards=kv_heads
        )
        self.o_proj = Linear(inner, hidden, shard="in", std=std)

    def build(self, x: Tensor, ctx: DecoderContext) -> Tensor:
        """Cross-attends: (batch * sequences_per_sample, length, hidden) -> the same shape."""
        q = self.q_proj(self.groups.copy_to_tp(ctx.packing.pack_sequences(x)))
        return ctx.packing.unpack_sequences(self.o_proj(self.attend_encoded(q, ctx)))


class T5Gemma2MergedAttention(GemmaProjections, CrossAttention):
    """One softmax over a decoder sequence's own keys and all of the encoder's output.

    Both have the same projections. Only own keys have positions, a causal mask and a window.
    """

    def __init__(self, c: T5GemmaModel, stack: GemmaStack, layer: LayerType) -> None:
        heads, kv_heads = stack.num_attention_heads, stack.num_key_value_heads
        dropout = Dropout.from_model_config(c, c.attention_dropout)
        super().__init__(heads, attention_spec(stack), kv_heads, dropout=dropout)
        self.add_projections(c, stack, layer)
        self.own_window = stack.sliding_window if layer.is_sliding else None

    def build(self, x: Tensor, ctx: DecoderContext) -> Tensor:
        """Attends to both: (batch * sequences_per_sample, length, hidden) -> the same shape."""
        q, k, v = map(transpose_heads, self.project(x, ctx))
        k, v = ctx.update_cache(k, v, self.own_window)
        bias = self._mask_bias(q.shape[2], k.shape[2], ctx)
        q, k, v = (join_sequences(t, ctx.packing.sequences_per_sample) for t in (q, k, v))
        pairs = zip((k, v), ctx.encoder_kv(self), strict=True)
        k, v = (ops.concat([own, encoded], 2) for own, encoded in pairs)
        return ctx.packing.unpack_sequences(self.o_proj(self.attend_heads(q, k, v, ctx, [bias])))

    def _mask_bias(self, queries: int, keys: int, ctx: DecoderContext) -> Tensor:
        """Returns the bias of a sample's queries: float32 (batch, 1, n * queries, all keys).

        Args:
            queries, keys: of each of the n sequences.
        """
        n = ctx.packing.sequences_per_sample
        positions = ctx.qk_ids(self.own_window) or qk_ids_in_order(queries, keys)
        of_queries, of_keys = (ops.concat([t] * n, 1) for t in positions[:2])
        own = causal_bias(of_queries, of_keys, self.own_window)
        if n > 1:
            ids = (np.repeat(np.arange(n), count)[None] for count in (queries, keys))
            own = own + segment_bias(*(popxl.constant(t, popxl.int32, "sequences") for t in ids))
        (encoded,), _ = ctx.encoder_padding_mask(takes_lengths=False, length=queries)
        batch, rows = encoded.shape[0], n * queries
        shapes = (batch, 1, rows, n * keys), (batch, 1, rows, encoded.shape[3])
        pairs = zip((own, encoded), shapes, strict=True)
        return ops.concat([t + ops.init(shape, popxl.float32) for t, shape in pairs], 3)

    def project_kv(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().project_kv(encoded)
        return self.k_norm(k), v


def join_sequences(x: Tensor, n: int) -> Tensor:
    """Joins the n sequences of a sample.

    (batch * n, heads, length, d) -> (batch, heads, n * length, d).
    """
    if n == 1:
        return x
    count, heads, length, size = x.shape
    x = x.reshape((count // n, n, heads, length, size)).transpose((0, 2, 1, 3, 4))
    return x.reshape((count // n, heads, n * length, size))


def attention_spec(
    stack: GemmaStack, causal: bool = False, window: int | tuple[int, int] | None = None
) -> AttentionSpec:
    """Returns scale, soft cap, mask and window of a stack's attention scores."""
    scale, softcap = stack.query_pre_attn_scalar**-0.5, stack.attn_logit_softcapping
    return AttentionSpec(scale, softcap, causal, window)


# ---- layers -------------------------------------------------------------------------------------
class T5GemmaEncoderLayer(Module):
    """T5Gemma's encoder layer: norms before and after both self-attention and MLP."""

    def __init__(self, c: T5GemmaModel, stack: GemmaStack, layer: LayerType) -> None:
        super().__init__()
        self.self_attn = self.make_attention(c, stack, layer)
        self.pre_self_attn_layernorm = make_norm(stack)
        self.post_self_attn_layernorm = make_norm(stack)
        self.mlp = GatedMLP(
            stack.hidden_size,
            stack.intermediate_size,
            get_activation(stack.hidden_activation),
            c.initializer_range,
            dropout=Dropout.from_model_config(c),
        )
        self.pre_feedforward_layernorm = make_norm(stack)
        self.post_feedforward_layernorm = make_norm(stack)

    def make_attention(
        self, c: T5GemmaModel, stack: GemmaStack, layer: LayerType
    ) -> MultiHeadAttention:
        """Builds the layer's self-attention."""
        return T5GemmaSelfAttention(c, stack, layer, causal=False)

    def build(self, x: Tensor, ctx: StackContext) -> Tensor:
        """Runs the layer: (batch, length, hidden) -> the same shape."""
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
    """T5Gemma's decoder layer: an encoder layer with causal mask and cross-attention."""

    def __init__(self, c: T5GemmaModel, stack: GemmaStack, layer: LayerType) -> None:
        super().__init__(c, stack, layer)
        self.cross_attn = T5GemmaCrossAttention(c)
        self.pre_cross_attn_layernorm = make_norm(stack)
        self.post_cross_attn_layernorm = make_norm(stack)

    def make_attention(
        self, c: T5GemmaModel, stack: GemmaStack, layer: LayerType
    ) -> MultiHeadAttention:
        return T5GemmaSelfAttention(c, stack, layer, causal=True)

    def build(self, x: Tensor, ctx: DecoderContext) -> Tensor:  # type: ignore[override]
        """Runs the layer: (batch * sequences_per_sample, length, hidden) -> the same shape."""
        x = self.add_self_attention(x, ctx)
        y = self.cross_attn(self.pre_cross_attn_layernorm(x), ctx)
        x = ctx.add_residual(x, self.post_cross_attn_layernorm(y))
        return self.add_feed_forward(x, ctx)


class T5Gemma2DecoderLayer(T5GemmaEncoderLayer):
    """An encoder layer, but with attention to the encoder's output in its self-attention."""

    def make_attention(
        self, c: T5GemmaModel, stack: GemmaStack, layer: LayerType
    ) -> MultiHeadAttention:
        return T5Gemma2MergedAttention(c, stack, layer)


def make_norm(stack: GemmaStack) -> RMSNorm:
    """Builds an RMS norm over a stack's features, times 1 + weight."""
    return RMSNorm(stack.hidden_size, stack.rms_norm_eps, unit_offset=True)


def make_head_norm(stack: GemmaStack) -> RMSNorm:
    """Builds an RMS norm over the features of a head, times 1 + weight."""
    return RMSNorm(stack.head_dim, stack.rms_norm_eps, unit_offset=True, in_tp_region=True)


# ---- embeddings of T5Gemma 2 --------------------------------------------------------------------
class T5Gemma2Tokens(VocabularyEmbedding):
    """Token embedding with one more vector, for the token at the end of an image."""

    def __init__(self, c: T5GemmaModel, hf_name: str) -> None:
        super().__init__(c.initializer_range, hf_name)
        self.eoi_embedding = parameter(c.hidden_size, std=0.0)

    def file_names(self, hf_path: str) -> HfTensorNames:
        """Returns the names of a copy that the decoder can have."""
        copy = "model.decoder.embed_tokens.eoi_embedding"
        return HfTensorNames(aliases={copy: f"{hf_path}.eoi_embedding"})


class T5Gemma2Embeddings(Embeddings):
    """Embeddings: dropout(tokens * scale); the token at the end of an image is not scaled."""

    tokens: T5Gemma2Tokens

    def __init__(self, c: T5GemmaModel) -> None:
        tokens = T5Gemma2Tokens(c, "model.encoder.text_model.embed_tokens")
        super().__init__(tokens, math.sqrt(c.hidden_size))
        self.eoi_token_index = c.eoi_token_index

    def build(self, input_ids: Tensor, seed: Tensor | None = None) -> Tensor:
        """Embeds tokens: int32 (batch, length) -> (batch, length, hidden)."""
        token_ids = self.layout.transpose_if_sequence_first(input_ids)
        eoi = popxl.constant(self.eoi_token_index, popxl.int32, "eoi")
        is_eoi = ops.equal(token_ids, eoi).reshape((*token_ids.shape, 1))
        x = ops.where(is_eoi, self.tokens.eoi_embedding, self.tokens(token_ids) * self.scale)
        return self.dropout(x, seed)


# ---- the model ----------------------------------------------------------------------------------
def encoder_decoder_spec(config: T5GemmaConfig) -> EncoderDecoderSpec:
    """Returns the model specification of a T5Gemma configuration."""
    c = config.model
    encoder = "model.encoder.text_model" if c.is_merged else "model.encoder"

    def embeddings(name: str) -> Embeddings:
        if c.is_merged:
            return T5Gemma2Embeddings(c)
        return Embeddings(tokens(name), math.sqrt(c.stacks[name].hidden_size))

    def tokens(name: str, is_shared: bool = False) -> VocabularyEmbedding:
        hf_name, hidden = f"model.{name}.embed_tokens", c.stacks[name].hidden_size
        return VocabularyEmbedding(c.initializer_range, hf_name, is_shared, hidden_size=hidden)

    def blocks(stack: GemmaStack, layer: type[T5GemmaEncoderLayer], hf_path: str) -> BlockStack:
        return BlockStack(
            stack.num_hidden_layers,
            lambda layer_type: layer(c, stack, layer_type),
            f"{hf_path}.layers",
            stack.layers,
            stack.hidden_size,
        )

    decoder_layer = T5Gemma2DecoderLayer if c.is_merged else T5GemmaDecoderLayer
    return EncoderDecoderSpec(
        embeddings=lambda: embeddings("encoder"),
        encoder=blocks(c.encoder, T5GemmaEncoderLayer, encoder),
        encoder_head=lambda: EncoderFinalNorm(
            make_norm(c.encoder), f"{encoder}.norm", Dropout.from_model_config(c)
        ),
        decoder_embeddings=None if c.is_merged else lambda: embeddings("decoder"),
        decoder=blocks(c.decoder, decoder_layer, "model.decoder"),
        head=lambda: LMHeadLoss(
            make_norm(c.decoder),
            "model.decoder.norm",
            c.initializer_range,
            tokens("decoder", is_shared=True) if c.tie_word_embeddings else None,
            Dropout.from_model_config(c),
            softcap=c.final_logit_softcapping,
            hf_linear="lm_head.out_proj",
        ),
        hf_embedding_names=["model.decoder.embed_tokens.weight"] if c.is_merged else [],
        has_decoder_tokens=not c.is_merged,
    )


FAMILY = encoder_decoder_family(
    encoder_decoder_spec,
    "modelling.t5gemma.config_json",
)
