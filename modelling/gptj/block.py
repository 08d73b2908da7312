"""GPT-J's layer: attention and feed-forward of the same normalised input, added to it together."""

from __future__ import annotations

import numpy as np

import popxl
from config.gptj import GPTJConfig
from modelling.gptj.attention import SelfAttention
from modelling.layers import NO_SEEDS, DecoderLayer, FeedForward, LayerNorm, Map, Seeds
from popxl import Tensor


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
            model.hidden_size, model.inner_size, self.groups, model.weight_group_size, bias=True
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
