"""GPT-J: causal attention with RoPE and a feed-forward layer, in parallel.

Wang and Komatsuzaki (2021); RoPE: Su et al. (arXiv:2104.09864).

RoPE rotates pairs of neighbouring features, the first `rotary_dim` ones of a head. Attention and
feed-forward have the same normed input; their outputs are added to x together.
"""

from __future__ import annotations

import numpy as np

import popxl
from config.gptj import GPTJConfig, GPTJModel
from modelling.decoder import DecoderSpec
from modelling.layers import (
    AttentionSpec,
    BlockContext,
    Dropout,
    Embeddings,
    FusedLinear,
    LayerNorm,
    Linear,
    Module,
    MultiHeadAttention,
    RopeTables,
    VocabularyEmbedding,
    make_output_layer,
)
from modelling.model_family import decoder_family
from popxl import Tensor, ops
from popxl_addons.ops.rotary_pos_embed import rotary_pos_embed, trig_table_constants


class GPTJAttention(MultiHeadAttention):
    """Causal self-attention with RoPE; heads are sharded over tensor parallelism."""

    def __init__(self, c: GPTJModel) -> None:
        spec = AttentionSpec(c.head_dim**-0.5, causal=True)
        super().__init__(c.attention.heads, spec, is_chunked=True)
        hidden, std, a = c.hidden_size, c.initializer_range, c.attention
        self.qkv = FusedLinear(hidden, hidden, {"q_proj": std, "k_proj": std, "v_proj": std})
        self.out_proj = Linear(hidden, hidden, shard="in", std=std)
        self.rotary_dim, self.rope_theta = a.rotary_dim, a.rotary_positional_embeddings_base

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        """Computes this replica's term of a sum over replicas: (batch, length, hidden) -> same."""
        q, k, v = (self.split_heads(t) for t in self.qkv(x))
        sin, cos = ctx.rope_tables(self._make_rope_tables, q.shape[1])
        q, k = (rotary_pos_embed(t, sin, cos, self.rotary_dim) for t in (q, k))
        return self.out_proj.partial_sum(self.attend(q, k, v, ctx))

    def _make_rope_tables(self, num_positions: int) -> RopeTables:
        return trig_table_constants(num_positions, self.rotary_dim, self.rope_theta)


class GPTJMLP(Module):
    """GPT-J's feed-forward layer: fc_out(gelu(fc_in x))."""

    def __init__(self, c: GPTJModel) -> None:
        super().__init__()
        hidden, inner, std = c.hidden_size, c.ffn_hidden_size, c.initializer_range
        self.fc_in = Linear(hidden, inner, shard="out", std=std, bias=True)
        self.fc_out = Linear(inner, hidden, shard="in", std=std, bias=True)

    def build(self, x: Tensor) -> Tensor:
        """Computes this replica's term of a sum over replicas, no bias: (..., hidden) -> same."""
        return self.fc_out.partial_sum(ops.gelu(self.fc_in(x)))


class GPTJBlock(Module):
    """GPT-J's block, with attention and MLP in parallel: x + attn(ln_1(x)) + mlp(ln_1(x)).

    Both branches are in one tensor-parallel region: one all-reduce in the forward and one in the
    backward pass, where the reference implementation has two each.
    """

    def __init__(self, c: GPTJModel) -> None:
        super().__init__()
        self.drop = Dropout.from_model_config(c)
        self.ln_1 = LayerNorm(c.hidden_size, c.layer_norm_epsilon)
        self.attn = GPTJAttention(c)
        self.mlp = GPTJMLP(c)

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor:
        """Runs the block: (batch, length, hidden) -> the same shape.

        Dropout before the sum over replicas equals dropout after it, if all terms and the bias have
        one mask; so two masks need only one all-reduce.
        """
        h = self.groups.copy_to_tp(self.ln_1(x))
        attn_output = ctx.dropout(self.attn(h, ctx))
        seed = ctx.next_seed()
        mlp_output = self.drop(self.mlp(h), seed)
        y = x + self.groups.reduce_from_tp(attn_output + mlp_output)
        bias = self.mlp.fc_out.bias
        if self.drop.is_active:
            ones = popxl.constant(np.ones(x.shape), x.dtype, "ones")
            bias = self.drop(ones * bias, seed)
        return y + bias


def decoder_spec(config: GPTJConfig) -> DecoderSpec:
    """Returns the model specification of a GPT-J configuration."""
    c, std = config.model, config.model.initializer_range
    return DecoderSpec(
        embeddings=lambda: Embeddings(VocabularyEmbedding(std, "transformer.wte")),
        layer_types=["full_attention"] * c.layers,
        block=lambda layer_type: GPTJBlock(c),
        head=lambda: make_output_layer(
            LayerNorm(c.hidden_size, c.layer_norm_epsilon), "transformer.ln_f", std, bias="trained"
        ),
        hf_layers="transformer.h",
    )


FAMILY = decoder_family(decoder_spec, "modelling.gptj.config_json")
