"""T5 (Raffel et al., arXiv:1910.10683): FLAN-T5 and T5 v1.1, T5 of 2019, and mT5, which settings
tell apart.

x is (batch, length, hidden), the same on all replicas of a tensor-parallel group; between
`copy_to_tp` and a `Linear` with `shard="in"` each replica has its heads or inner features. Initial
values are Hugging Face's (with initializer_factor 1), which are those of Mesh TensorFlow.
"""

from __future__ import annotations

from config.t5 import T5Config, T5Model
from modelling.encoder_decoder import BlockStack, EncoderDecoderSpec
from modelling.layers import (
    AttentionSpec,
    BlockContext,
    CrossAttention,
    DecoderContext,
    Dropout,
    Embeddings,
    FusedLinear,
    Linear,
    LMHeadLoss,
    Module,
    MultiHeadAttention,
    RMSNorm,
    StackContext,
    VocabularyEmbedding,
    activation,
)
from modelling.spec import encoder_decoder_family
from modelling.t5.biases import RelativePositionBias
from modelling.t5.config_json import from_config_json, normalize_config_json, to_config_json
from popxl import Tensor


# ---- attention and feed-forward -----------------------------------------------------------------
class T5SelfAttention(MultiHeadAttention):
    """Attention without a scale, for which the initial queries make up, with biases by relative
    position, which the first block of a stack lends to the others.

    Args:
        causal: whether positions see only themselves and those before.
        is_first: whether it is in the first block.
    """

    def __init__(self, c: T5Model, causal: bool, is_first: bool) -> None:
        super().__init__(c.attention.heads, AttentionSpec(), is_sliced=not causal)
        hidden, inner = c.hidden_size, c.attention.heads * c.attention.d_kv
        fan_in = {"q": hidden * c.attention.d_kv, "k": hidden, "v": hidden}
        self.qkv = FusedLinear(hidden, inner, {name: n**-0.5 for name, n in fan_in.items()})
        self.o = Linear(inner, hidden, shard="in", std=inner**-0.5)
        self.relative_attention_bias = RelativePositionBias(causal, is_shared=not is_first)

    def build(self, x: Tensor, ctx: StackContext) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        q, k, v = (self.split_heads(t) for t in self.qkv(self.groups.copy_to_tp(x)))
        position_bias = ctx.position_bias(self.relative_attention_bias, q.shape[1])
        masks, lengths = ctx.padding_mask(bool(self.fused))
        return self.o(self.attend(q, k, v, ctx, [position_bias, *masks], lengths))


class T5CrossAttention(CrossAttention):
    """Attention to the encoder's output, without position biases."""

    def __init__(self, c: T5Model) -> None:
        super().__init__(c.attention.heads, AttentionSpec())
        hidden, inner = c.hidden_size, c.attention.heads * c.attention.d_kv
        self.q = Linear(hidden, inner, shard="out", std=(hidden * c.attention.d_kv) ** -0.5)
        self.kv = FusedLinear(hidden, inner, {"k": hidden**-0.5, "v": hidden**-0.5})
        self.o = Linear(inner, hidden, shard="in", std=inner**-0.5)

    def build(self, x: Tensor, ctx: DecoderContext) -> Tensor:
        """x: (batch * sequences of a sample, length, hidden) -> the same shape."""
        q = self.q(self.groups.copy_to_tp(ctx.packing.pack_sequences(x)))
        return ctx.packing.unpack_sequences(self.o(self.attend_encoded(q, ctx)))


class T5MLP(Module):
    """wo(dropout(act(wi_0 x) * wi_1 x)), or without the gate wo(dropout(act(wi x))).

    Inner features are divided by `scale_ff`, undone after the sum: with float16 it keeps the
    products of two branches, and the sums in `wo`, in range.
    """

    def __init__(self, c: T5Model) -> None:
        super().__init__()
        self.act, self.scale = activation(c.activation), c.scale_ff
        self.drop = Dropout.from_model(c)
        names = ("wi_0", "wi_1") if c.gated else ("wi",)
        self.wi_all = FusedLinear(c.hidden_size, c.d_ff, dict.fromkeys(names, c.hidden_size**-0.5))
        self.wo = Linear(c.d_ff, c.hidden_size, shard="in", std=c.d_ff**-0.5)

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        first, *gated = self.wi_all(self.groups.copy_to_tp(x))
        inner = self.act(first) if self.scale == 1 else self.act(first) / self.scale
        for linear in gated:
            inner = inner * linear
        inner = self.drop(inner, self.groups.tp_seed(ctx.next_seed()))
        y = self.wo(inner)
        return y if self.scale == 1 else y * self.scale


# ---- blocks -------------------------------------------------------------------------------------
class T5LayerSelfAttention(Module):
    """x + SelfAttention(layer_norm(x))."""

    def __init__(self, c: T5Model, causal: bool, is_first: bool) -> None:
        super().__init__()
        self.SelfAttention = T5SelfAttention(c, causal, is_first)
        self.layer_norm = RMSNorm(c.hidden_size, c.layer_norm_epsilon)

    def build(self, x: Tensor, ctx: StackContext) -> Tensor:
        return ctx.add_residual(x, self.SelfAttention(self.layer_norm(x), ctx))


class T5LayerCrossAttention(Module):
    """x + EncDecAttention(layer_norm(x))."""

    def __init__(self, c: T5Model) -> None:
        super().__init__()
        self.EncDecAttention = T5CrossAttention(c)
        self.layer_norm = RMSNorm(c.hidden_size, c.layer_norm_epsilon)

    def build(self, x: Tensor, ctx: DecoderContext) -> Tensor:
        return ctx.add_residual(x, self.EncDecAttention(self.layer_norm(x), ctx))


class T5LayerFF(Module):
    """x + DenseReluDense(layer_norm(x))."""

    def __init__(self, c: T5Model) -> None:
        super().__init__()
        self.DenseReluDense = T5MLP(c)
        self.layer_norm = RMSNorm(c.hidden_size, c.layer_norm_epsilon)

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        return ctx.add_residual(x, self.DenseReluDense(self.layer_norm(x), ctx))


class T5EncoderBlock(Module):
    """Self-attention and feed-forward."""

    def __init__(self, c: T5Model, is_first: bool) -> None:
        super().__init__()
        self.layer = Module.from_list([T5LayerSelfAttention(c, False, is_first), T5LayerFF(c)])

    def build(self, x: Tensor, ctx: StackContext) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        for part in self.layer:
            x = part(x, ctx)
        return x


class T5DecoderBlock(Module):
    """Causal self-attention, cross-attention and feed-forward.

    Padding of x is at its end, where causality hides it, so x needs no mask.
    """

    def __init__(self, c: T5Model, is_first: bool) -> None:
        super().__init__()
        self.layer = Module.from_list(
            [T5LayerSelfAttention(c, True, is_first), T5LayerCrossAttention(c), T5LayerFF(c)]
        )

    def build(self, x: Tensor, ctx: DecoderContext) -> Tensor:
        """x: (batch * sequences of a sample, length, hidden) -> the same shape."""
        for part in self.layer:
            x = part(x, ctx)
        return x


# ---- the model ----------------------------------------------------------------------------------
class EncoderFinalNorm(Module):
    """The end of the encoder: norm and dropout."""

    def __init__(self, c: T5Model) -> None:
        super().__init__()
        self.dropout = Dropout.from_model(c)
        self.norm = RMSNorm(c.hidden_size, c.layer_norm_epsilon)
        self.norm.hf_name = "encoder.final_layer_norm"

    def build(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        return self.dropout(self.norm(x), seed)


def encoder_decoder_spec(config: T5Config) -> EncoderDecoderSpec:
    """A configured model. Of each stack the first block alone has relative positions."""
    c = config.model
    return EncoderDecoderSpec(
        embeddings=lambda: Embeddings(VocabularyEmbedding(1.0, "shared")),
        encoder=BlockStack(c.layers, lambda is_first: T5EncoderBlock(c, is_first), "encoder.block"),
        encoder_head=lambda: EncoderFinalNorm(c),
        decoder=BlockStack(
            c.decoder_depth, lambda is_first: T5DecoderBlock(c, is_first), "decoder.block"
        ),
        head=lambda: LMHeadLoss(
            RMSNorm(c.hidden_size, c.layer_norm_epsilon),
            "decoder.final_layer_norm",
            1.0,
            VocabularyEmbedding(1.0, "shared", is_shared=True) if c.embedding.tied else None,
            Dropout.from_model(c),
            scale=c.hidden_size**-0.5 if c.scaled_head else 1.0,
        ),
        hf_embedding_names=[f"{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")],
    )


FAMILY = encoder_decoder_family(
    encoder_decoder_spec,
    to_config_json,
    from_config_json,
    infers_tied_head=True,
    normalize_config_json=normalize_config_json,
)
