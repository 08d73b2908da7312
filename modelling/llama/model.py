"""Llama-like models: grouped-query attention, gated MLP or mixture of experts, RMS norms.

Grouped-query attention: Ainslie et al., arXiv:2305.13245; sliding windows: Beltagy et al.,
arXiv:2004.05150; QK norm: Henry et al., arXiv:2010.04245; gated feed-forward: Shazeer,
arXiv:2002.05202; experts: `modelling.layers.experts`.

Properties that config.json does not have, since all models of a type have them, follow from
`model_type`.

Shapes: x is (batch, length, hidden), equal on all replicas of a tensor-parallel group; between
`copy_to_tp` and a `Linear` with `shard="in"` each replica has its heads or feed-forward features.
For the backward pass a block's x is saved, and further activations as `execution.activations` says;
the rest is recomputed.
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
    Experts,
    ExpertUsage,
    ExpertWeightNames,
    FusedLinear,
    GatedMLP,
    HeadLoss,
    Linear,
    Module,
    MoE,
    MultiHeadAttention,
    RMSNorm,
    Router,
    ShardedRMSNorm,
    VocabularyEmbedding,
    cast_if_needed,
    get_activation,
    make_output_layer,
    parameter,
)
from modelling.llama.rotary import Rope
from modelling.model_family import decoder_family
from modelling.weights.hf_tensor_names import FusedWeights, HfTensorNames
from popxl import Tensor, ops

GEMMA, OLMO = ("gemma2", "gemma3_text"), ("olmo2", "olmo3")
QK_NORM_PER_HEAD = ("qwen3", "qwen3_moe", "gemma3_text")
"""Model types with RMS norms of queries and keys over each head."""
QK_NORM_FULL = (*OLMO, "olmoe")
"""Model types with RMS norms of queries and keys over all heads."""


# ---- attention ----------------------------------------------------------------------------------
class LlamaAttention(MultiHeadAttention):
    """Grouped-query attention with RoPE.

    Tensor parallelism shards heads; if there are fewer KV heads than replicas, several replicas
    have the same ones. gpt-oss has attention sinks: a learned score of each head, of no key.
    """

    def __init__(self, c: LlamaModel, layer: LayerType) -> None:
        hidden, std, model_type = c.hidden_size, c.initializer_range, c.model_type
        heads, kv_heads, head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        has_sinks = model_type == "gpt_oss"
        spec = AttentionSpec(
            scale=c.attention_multiplier or (c.query_pre_attn_scalar or head_dim) ** -0.5,
            softcap=c.attn_logit_softcapping,
            causal=True,
            window=c.sliding_window if layer.is_sliding else None,
            has_sinks=has_sinks,
        )
        super().__init__(heads, spec, kv_heads, is_chunked=True)
        self.model_type, self.has_sinks = model_type, has_sinks
        bias = c.attention_bias or model_type == "qwen2"
        out_bias = c.attention_bias and model_type != "qwen2_moe"
        kv = {"k_proj": std, "v_proj": std}
        self.q_proj = Linear(hidden, heads * head_dim, shard="out", std=std, bias=bias)
        self.kv = FusedLinear(hidden, kv_heads * head_dim, kv, bias=bias, max_shards=kv_heads)
        self.o_proj = Linear(heads * head_dim, hidden, shard="in", std=std, bias=out_bias)
        if has_sinks:
            self.sinks = parameter(heads, std=std, shard=0)
        if model_type in QK_NORM_PER_HEAD:
            self.q_norm = make_norm(c, head_dim, in_tp_region=True)
            self.k_norm = make_norm(c, head_dim, in_tp_region=True)
        elif model_type in QK_NORM_FULL:
            self.q_norm = ShardedRMSNorm(heads * head_dim, c.rms_norm_eps, heads)
            self.k_norm = ShardedRMSNorm(kv_heads * head_dim, c.rms_norm_eps, kv_heads)
        self.rope = Rope(c, layer)

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        """Computes self-attention: (batch, length, hidden) -> the same shape."""
        x = self.groups.copy_to_tp(x)
        q, (k, v) = self.q_proj(x), self.kv(x)
        if self.model_type in QK_NORM_FULL:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = self.split_heads(q), self.split_kv_heads(k), self.split_kv_heads(v)
        if self.model_type in QK_NORM_PER_HEAD:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, k, ctx)
        return self.o_proj(self.attend(q, k, v, ctx, [self.sinks] if self.has_sinks else []))

    def file_names(self, hf_path: str) -> HfTensorNames:
        """Returns the names under which Phi-3's files fuse queries, keys and values."""
        if self.model_type != "phi3":
            return HfTensorNames()
        qkv = [f"{hf_path}.{name}_proj.weight" for name in "qkv"]
        return HfTensorNames(fused={f"{hf_path}.qkv_proj.weight": FusedWeights.from_weights(qkv)})


# ---- feed-forward -------------------------------------------------------------------------------
class LlamaMLP(GatedMLP):
    """Gated MLP: down_proj(act(gate_proj x) * up_proj x)."""

    def __init__(self, c: LlamaModel, intermediate_size: int, bias: bool = False) -> None:
        act = get_activation(c.hidden_act)
        super().__init__(c.hidden_size, intermediate_size, act, c.initializer_range, bias)
        self.model_type = c.model_type

    def file_names(self, hf_path: str) -> HfTensorNames:
        """Returns the name under which Phi-3's files fuse the gate and up projections."""
        if self.model_type != "phi3":
            return HfTensorNames()
        gate_up = [f"{hf_path}.{name}_proj.weight" for name in ("gate", "up")]
        return HfTensorNames(
            fused={f"{hf_path}.gate_up_proj.weight": FusedWeights.from_weights(gate_up)}
        )


def make_experts(c: LlamaModel, num_experts_in_group: int | None = None) -> Experts:
    """Builds the experts of a whole layer or of one expert group."""
    is_gpt_oss, act, limit = c.model_type == "gpt_oss", get_activation(c.hidden_act), c.swiglu_limit
    names = ExpertWeightNames(interleaved=is_gpt_oss)
    if c.model_type == "mixtral":
        names = ExpertWeightNames("w1", "w3", "w2", stacked_in="mlp")

    def gated_activation(gate: Tensor, up: Tensor) -> Tensor:
        return act(gate) * up if limit is None else clamped_swiglu(gate, up, limit, c.swiglu_alpha)

    return Experts(
        c.num_experts,
        c.ffn_hidden_size,
        gated_activation,
        c.initializer_range,
        bias=is_gpt_oss,
        names=names,
        num_experts_in_group=num_experts_in_group,
    )


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """Computes g * sigmoid(alpha * g) * (u + 1), with g and u clamped, as in gpt-oss.

    g = min(gate, limit), u = clamp(up, ±limit); arXiv:2508.10925; (..., features) -> the same shape
    and dtype, computed in float32.
    """
    g = ops.clamp(cast_if_needed(gate, popxl.float32), max=limit)
    u = ops.clamp(cast_if_needed(up, popxl.float32), -limit, limit)
    return cast_if_needed(ops.swish(g * alpha) * (u + 1.0) * (1 / alpha), gate.dtype)


def make_moe(c: LlamaModel) -> MoE:
    """Builds a mixture-of-experts layer: router, experts and, if configured, shared expert."""
    is_gpt_oss, std = c.model_type == "gpt_oss", c.initializer_range
    shared_size = c.shared_expert_intermediate_size
    return MoE(
        Router(
            c.num_experts,
            c.num_experts_per_tok,
            std,
            c.norm_topk_prob,
            bias=is_gpt_oss,
            hf_name="router" if is_gpt_oss else None,
        ),
        make_experts(c),
        None if shared_size is None else LlamaMLP(c, shared_size),
        std,
        hf_name=hf_mlp_name(c),
        router_alias="mlp.gate.weight" if c.model_type == "mixtral" else None,
    )


def hf_mlp_name(c: LlamaModel) -> str | None:
    """Returns a block's MLP name in Hugging Face files; None if it is `mlp`, as in the module."""
    return "block_sparse_moe" if c.model_type == "mixtral" else None


# ---- blocks -------------------------------------------------------------------------------------
class LlamaBlock(Module):
    """Pre-norm block: x + attn(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, c: LlamaModel, layer: LayerType) -> None:
        super().__init__()
        self.multiplier = c.residual_multiplier
        self.self_attn = LlamaAttention(c, layer)
        self.mlp = make_moe(c) if c.num_experts else LlamaMLP(c, c.ffn_hidden_size, c.mlp_bias)
        self.add_norms(c)

    def add_norms(self, c: LlamaModel) -> None:
        """Adds the norms of the block as submodules."""
        self.input_layernorm = make_norm(c)
        self.post_attention_layernorm = make_norm(c)

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        """Runs the block: (batch, length, hidden) -> the same shape."""
        x = ctx.add_residual(x, self.self_attn(self.input_layernorm(x), ctx), self.multiplier)
        h = self.post_attention_layernorm(x)
        return ctx.add_residual(x, self.mlp(h, ctx), self.multiplier)


class OlmoBlock(LlamaBlock):
    """Post-norm block of OLMo 2 (arXiv:2501.00656): x + norm(attn(x)), then x + norm(mlp(x))."""

    def add_norms(self, c: LlamaModel) -> None:
        self.post_attention_layernorm = make_norm(c)
        self.post_feedforward_layernorm = make_norm(c)

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        y = self.post_attention_layernorm(self.self_attn(x, ctx))
        x = ctx.add_residual(x, y, self.multiplier)
        y = self.post_feedforward_layernorm(self.mlp(x, ctx))
        return ctx.add_residual(x, y, self.multiplier)


class GemmaBlock(LlamaBlock):
    """Block of Gemma 2 (arXiv:2408.00118): norms before and after attention and MLP."""

    def add_norms(self, c: LlamaModel) -> None:
        self.input_layernorm = make_norm(c)
        self.post_attention_layernorm = make_norm(c)
        self.pre_feedforward_layernorm = make_norm(c)
        self.post_feedforward_layernorm = make_norm(c)

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        y = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), ctx))
        x = ctx.add_residual(x, y, self.multiplier)
        y = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x), ctx))
        return ctx.add_residual(x, y, self.multiplier)


BLOCKS = dict.fromkeys(OLMO, OlmoBlock) | dict.fromkeys(GEMMA, GemmaBlock)


def make_norm(c: LlamaModel, features: int | None = None, in_tp_region: bool = False) -> RMSNorm:
    """Builds an RMS norm over `features` (default hidden_size); Gemma scales by 1 + weight."""
    return RMSNorm(features or c.hidden_size, c.rms_norm_eps, c.model_type in GEMMA, in_tp_region)


# ---- the model ----------------------------------------------------------------------------------
def decoder_spec(config: LlamaConfig) -> DecoderSpec:
    """Returns the model specification of a Llama-like configuration."""
    c, std = config.model, config.model.initializer_range
    expert_groups, expert_usage = config.execution.expert_groups, None
    if c.num_experts and not c.eval and not config.training.needs_whole_batch:
        expert_usage = ExpertUsage(c.num_experts, c.num_experts_per_tok, c.router_aux_loss_coef)

    def make_embedding(is_shared: bool = False) -> VocabularyEmbedding:
        return VocabularyEmbedding(std, "model.embed_tokens", is_shared)

    def make_head() -> HeadLoss:
        return make_output_layer(
            make_norm(c),
            "model.norm",
            std,
            tokens=make_embedding(is_shared=True) if c.tie_word_embeddings else None,
            scale=1 / c.logits_scaling,
            softcap=c.final_logit_softcapping,
            expert_usage=expert_usage,
        )

    def make_expert_group() -> ExpertGroup:
        return ExpertGroup(make_experts(c, c.num_experts // expert_groups), hf_mlp_name(c))

    is_gemma = c.model_type in GEMMA
    scale = math.sqrt(c.hidden_size) if is_gemma else c.embedding_multiplier
    return DecoderSpec(
        embeddings=lambda: Embeddings(make_embedding(), scale),
        layer_types=c.layers,
        block=lambda layer: BLOCKS.get(c.model_type, LlamaBlock)(c, layer),
        head=make_head,
        hf_layers="model.layers",
        experts=make_expert_group if expert_groups > 1 else None,
        expert_usage=expert_usage,
    )


FAMILY = decoder_family(decoder_spec, "modelling.llama.config_json")
