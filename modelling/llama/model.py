"""Llama-shaped decoders: causal attention with grouped keys and values, gated feed-forward or
experts, RMS norms.

Grouped-query attention: Ainslie et al., arXiv:2305.13245; sliding windows: Beltagy et al.,
arXiv:2004.05150; norms of queries and keys: Henry et al., arXiv:2010.04245; gated feed-forward:
Shazeer, arXiv:2002.05202; experts: `modelling.layers.experts`.

Shapes: x is (batch, length, hidden), the same on all replicas of a tensor-parallel group; between
`copy_to_tp` and a `Linear` with `shard="in"` each replica has its heads or inner features.
"""

from __future__ import annotations

import popxl
from config.llama import LlamaConfig, LlamaModel
from modelling.decoder import Decoder
from modelling.layers import (
    Context,
    Embeddings,
    ExpertGroup,
    ExpertNames,
    Experts,
    ExpertUsage,
    Fused,
    Linear,
    LMHeadLoss,
    Module,
    MoE,
    MultiHeadAttention,
    RMSNorm,
    Router,
    Scores,
    ShardedRMSNorm,
    VocabularyEmbedding,
    activation,
    cast,
    parameter,
)
from modelling.layers.module import FileNames
from modelling.llama.config_json import from_config_json, normalise, to_config_json
from modelling.llama.rotary import Rope
from modelling.spec import decoder_family
from popxl import Tensor, ops


# ---- attention ----------------------------------------------------------------------------------
class LlamaAttention(MultiHeadAttention):
    """Tensor parallelism shards heads; where there are fewer heads of keys than replicas, several
    replicas hold the same ones. A layer of a sliding type sees `window` positions."""

    def __init__(self, c: LlamaModel, layer_type: str) -> None:
        a, window = c.attention, c.attention.window_of(layer_type)
        scale = a.head_size**-0.5 if a.scale is None else a.scale
        scores = Scores(scale, a.cap, causal=True, window=window, sinks=a.sinks)
        super().__init__(a.heads, scores, a.key_value_heads, is_sliced=True)
        hidden, std = c.hidden_size, c.initializer_range
        queries, keys = a.heads * a.head_size, a.key_value_heads * a.head_size
        self.norms, self.is_phi3 = a.norms, c.architecture == "phi3"
        self.q_proj = Linear(hidden, queries, shard="out", std=std, bias=a.input_bias)
        self.kv = Fused(
            hidden,
            keys,
            {"k_proj": std, "v_proj": std},
            bias=a.input_bias,
            max_shards=a.key_value_heads,
        )
        self.o_proj = Linear(queries, hidden, shard="in", std=std, bias=a.output_bias)
        self.has_sinks = a.sinks
        if a.sinks:
            self.sinks = parameter(a.heads, std=std, shard=0)
        if a.norms == "heads":
            self.q_norm = norm(c, a.head_size, in_sharded=True)
            self.k_norm = norm(c, a.head_size, in_sharded=True)
        elif a.norms == "projections":
            self.q_norm = ShardedRMSNorm(queries, c.norm_epsilon, a.heads)
            self.k_norm = ShardedRMSNorm(keys, c.norm_epsilon, a.key_value_heads)
        self.rope = Rope(c, layer_type)

    def build(self, x: Tensor, ctx: Context) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        x = self.groups.copy_to_tp(x)
        q, (k, v) = self.q_proj(x), self.kv(x)
        if self.norms == "projections":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = self.split(q), self.split_kv(k), self.split_kv(v)
        if self.norms == "heads":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, k, ctx)
        return self.o_proj(self.attend(q, k, v, ctx, [self.sinks] if self.has_sinks else []))

    def file_names(self, hf_path: str) -> FileNames:
        """Phi-3's files have one tensor for queries, keys and values."""
        if not self.is_phi3:
            return FileNames()
        parts = [f"{hf_path}.{name}_proj.weight" for name in "qkv"]
        return FileNames(fused={f"{hf_path}.qkv_proj.weight": parts})


# ---- feed-forward -------------------------------------------------------------------------------
class LlamaMLP(Module):
    """down_proj(act(gate_proj x) * up_proj x)."""

    def __init__(self, c: LlamaModel, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        hidden, std, self.is_phi3 = c.hidden_size, c.initializer_range, c.architecture == "phi3"
        self.act = activation(c.activation)
        both = {"gate_proj": std, "up_proj": std}
        self.gate_up = Fused(hidden, intermediate_size, both, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden, shard="in", std=std, bias=bias)

    def build(self, x: Tensor, ctx: Context) -> Tensor:
        """x: (..., hidden) -> the same shape."""
        gate, up = self.gate_up(self.groups.copy_to_tp(x))
        return self.down_proj(self.act(gate) * up)

    def file_names(self, hf_path: str) -> FileNames:
        """Phi-3's files have one tensor for gate and up."""
        if not self.is_phi3:
            return FileNames()
        parts = [f"{hf_path}.{name}_proj.weight" for name in ("gate", "up")]
        return FileNames(fused={f"{hf_path}.gate_up_proj.weight": parts})


def experts(c: LlamaModel, held: int | None = None) -> Experts:
    """The experts of a layer, or so many of them that are held."""
    e, names = c.experts, ExpertNames()
    if c.architecture == "mixtral":
        names = ExpertNames("w1", "w3", "w2", stacked_in="mlp")
    elif c.architecture == "gpt_oss":
        names = ExpertNames(interleaved=True)
    act, limit, slope = activation(c.activation), e.gate_limit, e.gate_slope

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return act(gate) * up if limit is None else clamped_swiglu(gate, up, limit, slope)

    std = c.initializer_range
    return Experts(e.count, c.inner_size, gated, std, e.biases, names, held)


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, slope: float) -> Tensor:
    """gate * sigmoid(slope * gate) * (up + 1), of a gate at most `limit` and up within +-`limit`,
    as gpt-oss has it (arXiv:2508.10925). In float32."""
    low = ops.clamp(cast(gate, popxl.float32), max=limit)
    within = ops.clamp(cast(up, popxl.float32), -limit, limit)
    return cast(ops.swish(low * slope) * (within + 1.0) * (1 / slope), gate.dtype)


def mixture(c: LlamaModel) -> MoE:
    """The router and the experts of a layer, and one that all tokens use."""
    e, std = c.experts, c.initializer_range
    is_mixtral = c.architecture == "mixtral"
    router_name = "router" if c.architecture == "gpt_oss" else None
    router = Router(e.count, e.chosen, std, e.normalised, e.biases, router_name)
    return MoE(
        router,
        experts(c),
        None if e.shared_size is None else LlamaMLP(c, e.shared_size),
        std,
        hf_name=mlp_name(c),
        router_alias="mlp.gate.weight" if is_mixtral else None,
    )


def mlp_name(c: LlamaModel) -> str | None:
    """Hugging Face's name of a block's `mlp`; None: this."""
    return "block_sparse_moe" if c.architecture == "mixtral" else None


# ---- blocks -------------------------------------------------------------------------------------
class LlamaBlock(Module):
    """A norm before each branch."""

    def __init__(self, c: LlamaModel, layer_type: str) -> None:
        super().__init__()
        self.multiplier = c.residual_scale
        self.self_attn = LlamaAttention(c, layer_type)
        self.mlp = mixture(c) if c.experts.count else LlamaMLP(c, c.inner_size, c.feed_forward_bias)
        self.norms(c)

    def norms(self, c: LlamaModel) -> None:
        """Make the norms."""
        self.input_layernorm = norm(c)
        self.post_attention_layernorm = norm(c)

    def build(self, x: Tensor, ctx: Context) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        x = ctx.add(x, self.self_attn(self.input_layernorm(x), ctx), self.multiplier)
        return ctx.add(x, self.mlp(self.post_attention_layernorm(x), ctx), self.multiplier)


class OlmoBlock(LlamaBlock):
    """A norm after each branch, as OLMo 2 has it (arXiv:2501.00656)."""

    def norms(self, c: LlamaModel) -> None:
        self.post_attention_layernorm = norm(c)
        self.post_feedforward_layernorm = norm(c)

    def build(self, x: Tensor, ctx: Context) -> Tensor:
        x = ctx.add(x, self.post_attention_layernorm(self.self_attn(x, ctx)), self.multiplier)
        return ctx.add(x, self.post_feedforward_layernorm(self.mlp(x, ctx)), self.multiplier)


class GemmaBlock(LlamaBlock):
    """A norm before and after each branch, as Gemma 2 has it (arXiv:2408.00118)."""

    def norms(self, c: LlamaModel) -> None:
        self.input_layernorm = norm(c)
        self.post_attention_layernorm = norm(c)
        self.pre_feedforward_layernorm = norm(c)
        self.post_feedforward_layernorm = norm(c)

    def build(self, x: Tensor, ctx: Context) -> Tensor:
        y = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), ctx))
        x = ctx.add(x, y, self.multiplier)
        y = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x), ctx))
        return ctx.add(x, y, self.multiplier)


BLOCKS = {"before": LlamaBlock, "after": OlmoBlock, "both": GemmaBlock}


def norm(c: LlamaModel, features: int | None = None, in_sharded: bool = False) -> RMSNorm:
    """A norm of x, or of so many features."""
    return RMSNorm(features or c.hidden_size, c.norm_epsilon, c.norms_from_one, in_sharded)


# ---- the model ----------------------------------------------------------------------------------
def decoder(config: LlamaConfig) -> Decoder:
    """A configured model. A head that is tied to the embedding has no weight of its own."""
    c, std = config.model, config.model.initializer_range
    groups, usage = config.execution.expert_groups, None
    if c.experts.count and not c.eval:
        usage = ExpertUsage(c.experts.count, c.experts.chosen, c.experts.balance)

    def embedding(is_shared: bool = False) -> VocabularyEmbedding:
        return VocabularyEmbedding(std, "model.embed_tokens", is_shared)

    return Decoder(
        embeddings=lambda: Embeddings(embedding(), c.embedding.scale),
        layer_types=c.kinds,
        block=lambda layer_type: BLOCKS[c.norms](c, layer_type),
        head=lambda: LMHeadLoss(
            norm(c),
            "model.norm",
            std,
            embedding(is_shared=True) if c.embedding.tied else None,
            scale=1 / c.logits_divisor,
            cap=c.logits_cap,
            usage=usage,
        ),
        experts=(lambda: ExpertGroup(experts(c, c.experts.count // groups), mlp_name(c)))
        if groups > 1
        else None,
        usage=usage,
        hf_layers="model.layers",
    )


FAMILY = decoder_family(decoder, to_config_json, from_config_json, normalise=normalise)
