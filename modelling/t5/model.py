"""T5 (Raffel et al., arXiv:1910.10683): T5 v1.0, v1.1, FLAN-T5, FLAN-UL2, mT5, umT5 and ByT5.

x is (batch, length, hidden), equal on all replicas of a tensor-parallel group; between `copy_to_tp`
and a `Linear` with `shard="in"` each replica has its heads or feed-forward features. Initial values
are Hugging Face's (with initializer_factor 1), which are Mesh TensorFlow's.
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
    EncoderFinalNorm,
    FusedLinear,
    Linear,
    Module,
    MultiHeadAttention,
    ReplicatedLinear,
    RMSNorm,
    StackContext,
    VocabularyEmbedding,
    get_activation,
    make_output_layer,
)
from modelling.model_family import encoder_decoder_family
from modelling.t5.relative_position import RelativePositionBias
from popxl import Tensor, ops

CLASSIFIER_PREFIX = "transformer."
"""Path of the model in T5ForSequenceClassification."""


# ---- attention and feed-forward -----------------------------------------------------------------
class T5SelfAttention(MultiHeadAttention):
    """Self-attention without score scaling, with a relative position bias.

    The initial queries make up for the scale. All blocks of a stack share the bias; umT5's have
    one each.

    Args:
        causal: True in the decoder.
        is_first: True in the first block of a stack, which owns a shared bias's weight.
    """

    def __init__(self, c: T5Model, causal: bool, is_first: bool) -> None:
        super().__init__(c.attention.heads, AttentionSpec(), is_chunked=not causal)
        hidden, inner = c.hidden_size, c.attention.heads * c.attention.d_kv
        fan_in = {"q": hidden * c.attention.d_kv, "k": hidden, "v": hidden}
        self.qkv = FusedLinear(hidden, inner, {name: n**-0.5 for name, n in fan_in.items()})
        self.o = Linear(inner, hidden, shard="in", std=inner**-0.5)
        is_shared = not (is_first or c.architecture == "umt5")
        self.relative_attention_bias = RelativePositionBias(causal, is_shared)

    def build(self, x: Tensor, ctx: StackContext) -> Tensor:
        """Computes self-attention: (batch, length, hidden) -> the same shape."""
        q, k, v = (self.split_heads(t) for t in self.qkv(self.groups.copy_to_tp(x)))
        position_bias = ctx.position_bias(self.relative_attention_bias, q.shape[1])
        masks, lengths = ctx.padding_mask(bool(self.fused))
        return self.o(self.attend(q, k, v, ctx, [position_bias, *masks], lengths))


class T5CrossAttention(CrossAttention):
    """Cross-attention to the encoder's output, without position biases."""

    def __init__(self, c: T5Model) -> None:
        super().__init__(c.attention.heads, AttentionSpec())
        hidden, inner = c.hidden_size, c.attention.heads * c.attention.d_kv
        self.q = Linear(hidden, inner, shard="out", std=(hidden * c.attention.d_kv) ** -0.5)
        self.kv = FusedLinear(hidden, inner, {"k": hidden**-0.5, "v": hidden**-0.5})
        self.o = Linear(inner, hidden, shard="in", std=inner**-0.5)

    def build(self, x: Tensor, ctx: DecoderContext) -> Tensor:
        """Cross-attends: (batch * sequences_per_sample, length, hidden) -> the same shape."""
        q = self.q(self.groups.copy_to_tp(ctx.packing.pack_sequences(x)))
        return ctx.packing.unpack_sequences(self.o(self.attend_encoded(q, ctx)))


class T5MLP(Module):
    """T5's MLP: wo(dropout(act(wi_0 x) * wi_1 x)), or wo(dropout(act(wi x))) without a gate.

    The input of wo is divided by `scale_ff`, its output multiplied: so the product of the branches
    and the sums in wo stay in the range of float16.
    """

    def __init__(self, c: T5Model) -> None:
        super().__init__()
        self.act, self.scale = get_activation(c.activation), c.scale_ff
        self.drop = Dropout.from_model_config(c)
        names = ("wi_0", "wi_1") if c.is_gated_act else ("wi",)
        self.wi_all = FusedLinear(c.hidden_size, c.d_ff, dict.fromkeys(names, c.hidden_size**-0.5))
        self.wo = Linear(c.d_ff, c.hidden_size, shard="in", std=c.d_ff**-0.5)

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        """Computes the MLP: (batch, length, hidden) -> the same shape."""
        gate, *up = self.wi_all(self.groups.copy_to_tp(x))
        h = self.act(gate) if self.scale == 1 else self.act(gate) / self.scale
        if up:
            h = h * up[0]
        h = self.drop(h, self.groups.tp_seed(ctx.next_seed()))
        y = self.wo(h)
        return y if self.scale == 1 else y * self.scale


# ---- blocks -------------------------------------------------------------------------------------
class T5LayerSelfAttention(Module):
    """T5's self-attention sublayer with residual: x + SelfAttention(layer_norm(x))."""

    def __init__(self, c: T5Model, causal: bool, is_first: bool) -> None:
        super().__init__()
        self.SelfAttention = T5SelfAttention(c, causal, is_first)
        self.layer_norm = RMSNorm(c.hidden_size, c.layer_norm_epsilon)

    def build(self, x: Tensor, ctx: StackContext) -> Tensor:
        """Runs the sublayer: (batch, length, hidden) -> the same shape."""
        return ctx.add_residual(x, self.SelfAttention(self.layer_norm(x), ctx))


class T5LayerCrossAttention(Module):
    """T5's cross-attention sublayer with residual: x + EncDecAttention(layer_norm(x))."""

    def __init__(self, c: T5Model) -> None:
        super().__init__()
        self.EncDecAttention = T5CrossAttention(c)
        self.layer_norm = RMSNorm(c.hidden_size, c.layer_norm_epsilon)

    def build(self, x: Tensor, ctx: DecoderContext) -> Tensor:
        """Runs the sublayer: (batch * sequences_per_sample, length, hidden) -> the same shape."""
        return ctx.add_residual(x, self.EncDecAttention(self.layer_norm(x), ctx))


class T5LayerFF(Module):
    """T5's feed-forward sublayer with residual: x + DenseReluDense(layer_norm(x))."""

    def __init__(self, c: T5Model) -> None:
        super().__init__()
        self.DenseReluDense = T5MLP(c)
        self.layer_norm = RMSNorm(c.hidden_size, c.layer_norm_epsilon)

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        """Runs the sublayer: (batch, length, hidden) -> the same shape."""
        return ctx.add_residual(x, self.DenseReluDense(self.layer_norm(x), ctx))


class T5EncoderBlock(Module):
    """A T5 encoder block: self-attention and feed-forward."""

    def __init__(self, c: T5Model, is_first: bool) -> None:
        super().__init__()
        self.layer = Module.from_list([T5LayerSelfAttention(c, False, is_first), T5LayerFF(c)])

    def build(self, x: Tensor, ctx: StackContext) -> Tensor:
        """Runs the block: (batch, length, hidden) -> the same shape."""
        for layer in self.layer:
            x = layer(x, ctx)
        return x


class T5DecoderBlock(Module):
    """A T5 decoder block: causal self-attention, cross-attention and feed-forward.

    Padding of x is at its end, where the causal mask hides it.
    """

    def __init__(self, c: T5Model, is_first: bool) -> None:
        super().__init__()
        self.layer = Module.from_list(
            [T5LayerSelfAttention(c, True, is_first), T5LayerCrossAttention(c), T5LayerFF(c)]
        )

    def build(self, x: Tensor, ctx: DecoderContext) -> Tensor:
        """Runs the block: (batch * sequences_per_sample, length, hidden) -> the same shape."""
        for layer in self.layer:
            x = layer(x, ctx)
        return x


# ---- the head of a classifier -------------------------------------------------------------------
class T5ClassificationHead(Module):
    """Head of T5ForSequenceClassification: out_proj(tanh(dense x)), equal on all replicas."""

    def __init__(self, c: T5Model) -> None:
        super().__init__("classification_head")
        hidden, std = c.hidden_size, c.hidden_size**-0.5
        self.dense = ReplicatedLinear(hidden, hidden, std)
        self.out_proj = ReplicatedLinear(hidden, self.config.num_labels, std)

    def build(self, x: Tensor) -> Tensor:
        """Scores sequences: float32 (sequences, hidden) -> float32 (sequences, labels)."""
        y: Tensor = self.out_proj(ops.tanh(self.dense(x)))
        return y


# ---- the model ----------------------------------------------------------------------------------
def encoder_decoder_spec(config: T5Config) -> EncoderDecoderSpec:
    """Returns the model specification of a T5 configuration."""
    c, hf = config.model, CLASSIFIER_PREFIX if config.training.head == "classifier" else ""
    return EncoderDecoderSpec(
        embeddings=lambda: Embeddings(VocabularyEmbedding(1.0, f"{hf}shared")),
        encoder=BlockStack(
            c.layers, lambda is_first: T5EncoderBlock(c, is_first), f"{hf}encoder.block"
        ),
        encoder_head=lambda: EncoderFinalNorm(
            RMSNorm(c.hidden_size, c.layer_norm_epsilon),
            f"{hf}encoder.final_layer_norm",
            Dropout.from_model_config(c),
        ),
        decoder=BlockStack(
            c.num_decoder_layers, lambda is_first: T5DecoderBlock(c, is_first), f"{hf}decoder.block"
        ),
        head=lambda: make_output_layer(
            RMSNorm(c.hidden_size, c.layer_norm_epsilon),
            f"{hf}decoder.final_layer_norm",
            1.0,
            tokens=VocabularyEmbedding(1.0, "shared", is_shared=True) if c.embedding.tied else None,
            dropout=Dropout.from_model_config(c),
            classifier=lambda: T5ClassificationHead(c),
            scale=c.hidden_size**-0.5 if c.scale_decoder_outputs else 1.0,
        ),
        hf_embedding_names=[f"{hf}{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")],
    )


FAMILY = encoder_decoder_family(
    encoder_decoder_spec,
    "modelling.t5.config_json",
    infers_tied_head=True,
    classifier_prefix=CLASSIFIER_PREFIX,
)
