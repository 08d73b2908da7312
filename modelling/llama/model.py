"""Llama-shaped decoders: causal attention with grouped keys and values, gated feed-forward or
experts, RMS norms.

Grouped-query attention: Ainslie et al., arXiv:2305.13245; sliding windows: Beltagy et al.,
arXiv:2004.05150; norms of queries and keys: Henry et al., arXiv:2010.04245; gated feed-forward:
Shazeer, arXiv:2002.05202; experts: `modelling.layers.experts`.

What config.json does not say, since models of a type always do it, is asked of `model_type`.

Shapes: x is (batch, length, hidden), the same on all replicas of a tensor-parallel group; between
`copy_to_tp` and a `Linear` with `shard="in"` each replica has its heads or inner features. For the
backward pass a block's x is kept, and what its forward pass saved where `execution.activations`
says so; the rest is computed again.
"""

from __future__ import annotations

import math

import popxl
from config.llama import LayerType, LlamaConfig, LlamaModel
from modelling.decoder import DecoderSpec
from modelling.layers import (
    AttentionSpec,
    BlockContext,
    Embeddings,
    ExpertGroup,
    ExpertNames,
    Experts,
    ExpertUsage,
    FusedLinear,
    Linear,
    LMHeadLoss,
    Module,
    MoE,
    MultiHeadAttention,
    RMSNorm,
    Router,
    ShardedRMSNorm,
    VocabularyEmbedding,
    activation,
    cast,
    parameter,
)
from modelling.llama.config_json import from_config_json, normalize_config_json, to_config_json
from modelling.llama.rotary import Rope
from modelling.spec import decoder_family
from modelling.weights.hf_tensor_names import FusedWeights, HfTensorNames
from popxl import Tensor, ops

GEMMA, OLMO = ("gemma2", "gemma3_text"), ("olmo2", "olmo3")
NORMS_OF_HEADS = ("qwen3", "qwen3_moe", "gemma3_text")
"""Types with RMS norms of each head's queries and keys."""
NORMS_OF_PROJECTIONS = (*OLMO, "olmoe")
"""Types with RMS norms of all queries and all keys."""


# ---- attention ----------------------------------------------------------------------------------
class LlamaAttention(MultiHeadAttention):
    """Tensor parallelism shards heads; where there are fewer heads of keys than replicas, several
    replicas hold the same ones. A sliding layer sees `sliding_window` positions. gpt-oss has sinks:
    a learned score of each head beside those of the keys, of nothing."""

    def __init__(self, c: LlamaModel, layer: LayerType) -> None:
        hidden, std, kind = c.hidden_size, c.initializer_range, c.model_type
        heads, kv_heads, size = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        scale = c.attention_multiplier or (c.query_pre_attn_scalar or size) ** -0.5
        window = c.sliding_window if layer.is_sliding else None
        cap, has_sinks = c.attn_logit_softcapping, kind == "gpt_oss"
        scores = AttentionSpec(scale, cap, causal=True, window=window, sinks=has_sinks)
        super().__init__(heads, scores, kv_heads, is_sliced=True)
        self.kind, self.has_sinks = kind, has_sinks
        bias = c.attention_bias or kind == "qwen2"
        out_bias = c.attention_bias and kind != "qwen2_moe"
        kv = {"k_proj": std, "v_proj": std}
        self.q_proj = Linear(hidden, heads * size, shard="out", std=std, bias=bias)
        self.kv = FusedLinear(hidden, kv_heads * size, kv, bias=bias, max_shards=kv_heads)
        self.o_proj = Linear(heads * size, hidden, shard="in", std=std, bias=out_bias)
        if has_sinks:
            self.sinks = parameter(heads, std=std, shard=0)
        if kind in NORMS_OF_HEADS:
            self.q_norm = norm(c, size, in_tp_region=True)
            self.k_norm = norm(c, size, in_tp_region=True)
        elif kind in NORMS_OF_PROJECTIONS:
            self.q_norm = ShardedRMSNorm(heads * size, c.rms_norm_eps, heads)
            self.k_norm = ShardedRMSNorm(kv_heads * size, c.rms_norm_eps, kv_heads)
        self.rope = Rope(c, layer)

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        x = self.groups.copy_to_tp(x)
        q, (k, v) = self.q_proj(x), self.kv(x)
        if self.kind in NORMS_OF_PROJECTIONS:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = self.split_heads(q), self.split_kv_heads(k), self.split_kv_heads(v)
        if self.kind in NORMS_OF_HEADS:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, k, ctx)
        return self.o_proj(self.attend(q, k, v, ctx, [self.sinks] if self.has_sinks else []))

    def file_names(self, hf_path: str) -> HfTensorNames:
        """Phi-3's files have one tensor for queries, keys and values."""
        if self.kind != "phi3":
            return HfTensorNames()
        parts = [f"{hf_path}.{name}_proj.weight" for name in "qkv"]
        return HfTensorNames(fused={f"{hf_path}.qkv_proj.weight": FusedWeights.from_weights(parts)})


# ---- feed-forward -------------------------------------------------------------------------------
class LlamaMLP(Module):
    """down_proj(act(gate_proj x) * up_proj x)."""

    def __init__(self, c: LlamaModel, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        hidden, std, self.kind = c.hidden_size, c.initializer_range, c.model_type
        self.act = activation(c.hidden_act)
        both = {"gate_proj": std, "up_proj": std}
        self.gate_up = FusedLinear(hidden, intermediate_size, both, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden, shard="in", std=std, bias=bias)

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        """x: (..., hidden) -> the same shape."""
        gate, up = self.gate_up(self.groups.copy_to_tp(x))
        return self.down_proj(self.act(gate) * up)

    def file_names(self, hf_path: str) -> HfTensorNames:
        """Phi-3's files have one tensor for gate and up."""
        if self.kind != "phi3":
            return HfTensorNames()
        parts = [f"{hf_path}.{name}_proj.weight" for name in ("gate", "up")]
        return HfTensorNames(
            fused={f"{hf_path}.gate_up_proj.weight": FusedWeights.from_weights(parts)}
        )


def experts(c: LlamaModel, held: int | None = None) -> Experts:
    """The experts of a layer, or so many of them that are held."""
    is_gpt, act, limit = c.model_type == "gpt_oss", activation(c.hidden_act), c.swiglu_limit
    names = ExpertNames(interleaved=is_gpt)
    if c.model_type == "mixtral":
        names = ExpertNames("w1", "w3", "w2", stacked_in="mlp")

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return act(gate) * up if limit is None else clamped_swiglu(gate, up, limit, c.swiglu_alpha)

    std, has_bias = c.initializer_range, is_gpt
    return Experts(c.num_experts, c.ffn_hidden_size, gated, std, has_bias, names, held)


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, slope: float) -> Tensor:
    """gate * sigmoid(slope * gate) * (up + 1), of a gate at most `limit` and up within +-`limit`,
    as gpt-oss has it (arXiv:2508.10925). In float32."""
    low = ops.clamp(cast(gate, popxl.float32), max=limit)
    within = ops.clamp(cast(up, popxl.float32), -limit, limit)
    return cast(ops.swish(low * slope) * (within + 1.0) * (1 / slope), gate.dtype)


def mixture(c: LlamaModel) -> MoE:
    """The router and the experts of a layer, and one that all tokens use."""
    std, is_gpt, per_token = c.initializer_range, c.model_type == "gpt_oss", c.num_experts_per_tok
    size, name = c.shared_expert_intermediate_size, "router" if is_gpt else None
    router = Router(c.num_experts, per_token, std, c.norm_topk_prob, bias=is_gpt, hf_name=name)
    shared = None if size is None else LlamaMLP(c, size)
    alias = "mlp.gate.weight" if c.model_type == "mixtral" else None
    return MoE(router, experts(c), shared, std, hf_name=mlp_name(c), router_alias=alias)


def mlp_name(c: LlamaModel) -> str | None:
    """Hugging Face's name of a block's `mlp`; None: this."""
    return "block_sparse_moe" if c.model_type == "mixtral" else None


# ---- blocks -------------------------------------------------------------------------------------
class LlamaBlock(Module):
    """A norm before each branch."""

    def __init__(self, c: LlamaModel, layer: LayerType) -> None:
        super().__init__()
        self.multiplier = c.residual_multiplier
        self.self_attn = LlamaAttention(c, layer)
        self.mlp = mixture(c) if c.num_experts else LlamaMLP(c, c.ffn_hidden_size, c.mlp_bias)
        self.norms(c)

    def norms(self, c: LlamaModel) -> None:
        """Make the norms."""
        self.input_layernorm = norm(c)
        self.post_attention_layernorm = norm(c)

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        x = ctx.add_residual(x, self.self_attn(self.input_layernorm(x), ctx), self.multiplier)
        return ctx.add_residual(x, self.mlp(self.post_attention_layernorm(x), ctx), self.multiplier)


class OlmoBlock(LlamaBlock):
    """A norm after each branch, as OLMo 2 has it (arXiv:2501.00656)."""

    def norms(self, c: LlamaModel) -> None:
        self.post_attention_layernorm = norm(c)
        self.post_feedforward_layernorm = norm(c)

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        y = self.post_attention_layernorm(self.self_attn(x, ctx))
        x = ctx.add_residual(x, y, self.multiplier)
        y = self.post_feedforward_layernorm(self.mlp(x, ctx))
        return ctx.add_residual(x, y, self.multiplier)


class GemmaBlock(LlamaBlock):
    """A norm before and after each branch, as Gemma 2 has it (arXiv:2408.00118)."""

    def norms(self, c: LlamaModel) -> None:
        self.input_layernorm = norm(c)
        self.post_attention_layernorm = norm(c)
        self.pre_feedforward_layernorm = norm(c)
        self.post_feedforward_layernorm = norm(c)

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        y = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), ctx))
        x = ctx.add_residual(x, y, self.multiplier)
        y = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x), ctx))
        return ctx.add_residual(x, y, self.multiplier)


BLOCKS = dict.fromkeys(OLMO, OlmoBlock) | dict.fromkeys(GEMMA, GemmaBlock)


def norm(c: LlamaModel, features: int | None = None, in_tp_region: bool = False) -> RMSNorm:
    """A norm of x, or of so many features. Gemma scales by 1 + weight."""
    return RMSNorm(features or c.hidden_size, c.rms_norm_eps, c.model_type in GEMMA, in_tp_region)


# ---- the model ----------------------------------------------------------------------------------
def decoder_spec(config: LlamaConfig) -> DecoderSpec:
    """A configured model. A head that is tied to the embedding has no weight of its own."""
    c, std = config.model, config.model.initializer_range
    groups, expert_usage, is_gemma = config.execution.expert_groups, None, c.model_type in GEMMA
    if c.num_experts and not c.eval:
        expert_usage = ExpertUsage(c.num_experts, c.num_experts_per_tok, c.router_aux_loss_coef)

    def embedding(is_shared: bool = False) -> VocabularyEmbedding:
        return VocabularyEmbedding(std, "model.embed_tokens", is_shared)

    factor = math.sqrt(c.hidden_size) if is_gemma else c.embedding_multiplier
    return DecoderSpec(
        embeddings=lambda: Embeddings(embedding(), factor),
        layer_types=c.layers,
        block=lambda layer: BLOCKS.get(c.model_type, LlamaBlock)(c, layer),
        head=lambda: LMHeadLoss(
            norm(c),
            "model.norm",
            std,
            embedding(is_shared=True) if c.tie_word_embeddings else None,
            scale=1 / c.logits_scaling,
            cap=c.final_logit_softcapping,
            expert_usage=expert_usage,
        ),
        experts=(lambda: ExpertGroup(experts(c, c.num_experts // groups), mlp_name(c)))
        if groups > 1
        else None,
        expert_usage=expert_usage,
        hf_layers="model.layers",
    )


FAMILY = decoder_family(
    decoder_spec, to_config_json, from_config_json, normalize_config_json=normalize_config_json
)
