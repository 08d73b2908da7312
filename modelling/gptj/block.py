"""GPT-J's layer and head.

Attention is causal, with queries and keys rotated by their positions (Su et al., arXiv:2104.09864).
Neighbouring features of a head are the pairs that are rotated, and only the first `rotary_dim`
features are. Attention and feed-forward have the same normalised input, and are added to it
together.
"""

from __future__ import annotations

import numpy as np

import popxl
from config.gptj import GPTJConfig
from modelling.layers import (
    NO_SEEDS,
    DecoderAttention,
    DecoderLayer,
    Dropout,
    FeedForward,
    FusedLinear,
    Groups,
    LayerNorm,
    LMHeadLoss,
    Map,
    Scores,
    Seeds,
    Tables,
    heads_first,
)
from popxl import Tensor
from popxl_addons.ops.rotary_pos_embed import rotary_pos_embed, trig_table_constants


class SelfAttention(DecoderAttention):
    """This replica's heads, inside a sharded computation.

    Variables: `qkv.weight` (hidden, 3 * features on a replica), `output.weight`.
    """

    def __init__(self, config: GPTJConfig, groups: Groups) -> None:
        model = config.model
        super().__init__(
            config,
            groups,
            model.attention.heads,
            model.head_size,
            Scores(model.head_size**-0.5, causal=True),
            slices=config.execution.attention_slices,
        )
        self.model = model
        self.qkv = FusedLinear(self.features, 3, groups.sharded, self.few_bits)

    def tables(self, positions: int) -> Tables:
        """See `DecoderAttention`."""
        attention = self.model.attention
        base = attention.rotary_positional_embeddings_base
        return trig_table_constants(positions, attention.rotary_dim, base)

    def project(self, x: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor, Tensor]:
        """See `DecoderAttention`."""
        assert tables is not None
        q, k, v = map(self.of_heads, self.qkv(x))
        rotary_dim = self.model.attention.rotary_dim
        q, k = (rotary_pos_embed(t, tables[0], tables[1], rotary_dim) for t in (q, k))
        return heads_first(q), heads_first(k), heads_first(v)


class Block(DecoderLayer):
    """x + attention(norm(x)) + feed_forward(norm(x)).

    Both branches are inside one sharded computation: one all-reduce forwards and one backwards,
    where the reference implementation has two each.

    Variables: those of `norm`, `attention` and `feed_forward`, and `feed_forward_bias` (hidden,).
    """

    def __init__(self, config: GPTJConfig) -> None:
        super().__init__(config)
        model = config.model
        self.norm = LayerNorm(model.layer_norm_epsilon)
        self.attention = SelfAttention(config, self.groups)
        self.feed_forward = FeedForward(
            model.hidden_size, model.inner_size, self.groups, model.few_bits_in_layers, bias=True
        )

    def around(self, x: Tensor, attend: Map, seeds: Seeds = NO_SEEDS) -> Tensor:
        """See `DecoderLayer`.

        Dropout before the sum over replicas is the same as after it, with one mask for all parts
        and the bias; so two masks need no second sum.
        """
        attention_seed, feed_forward_seed = seeds
        opened = self.groups.copy_to_tp(self.norm(x))
        attended = self.dropout(attend(opened), attention_seed)
        fed = self.dropout(self.feed_forward(opened), feed_forward_seed)
        total = x + self.groups.reduce_from_tp(attended + fed)
        bias = self.weight("feed_forward_bias", x.shape[-1:], x.dtype)
        if self.dropout.active:
            ones = popxl.constant(np.ones(x.shape), x.dtype, "ones")
            bias = self.dropout(ones * bias, feed_forward_seed)
        return total + bias


class DecoderHead(LMHeadLoss):
    """The final norm, logits with a bias, and the loss."""

    def __init__(self, config: GPTJConfig) -> None:
        norm = LayerNorm(config.model.layer_norm_epsilon)
        super().__init__(config, norm, Dropout(), bias=True)
