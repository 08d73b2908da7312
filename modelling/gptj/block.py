"""GPT-J's layer: attention and feed-forward of the same normalised input, added to it together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import popxl
from config.gptj import GPTJConfig
from modelling.gptj.attention import SelfAttention
from modelling.layers import Dropout, FeedForward, Groups, Layer, LayerNorm
from popxl import Tensor


class Block(Layer):
    """x + attention(norm(x)) + feed_forward(norm(x)).

    Both branches are inside one sharded computation: one all-reduce forwards and one backwards,
    where the reference implementation has two each.

    Variables: those of `norm`, `attention` and `feed_forward`, and `feed_forward_bias` (hidden,).
    """

    def __init__(self, config: GPTJConfig) -> None:
        super().__init__()
        model = config.model
        self.room = model.output_length
        self.groups = Groups.current(config.execution.tensor_parallel)
        self.dropout = Dropout.of(model)
        self.norm = LayerNorm(model.layer_norm_epsilon)
        self.attention = SelfAttention(config, self.groups)
        self.feed_forward = FeedForward(
            model.hidden_size, model.inner_size, self.groups, model.weight_group_size, bias=True
        )

    def build(self, x: Tensor, starts: Tensor | None = None, seed: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> the same shape.

        Args:
            starts: int32 (batch, length), where in its sample each token's text starts; None: a
                sample is one text.
            seed: uint32 (2,) for dropout, the same on the replicas of a tensor-parallel group.
        """
        attention_seed, *output_seeds = self.dropout.seeds(seed, 3)
        return self.around(x, lambda t: self.attention(t, attention_seed, starts), *output_seeds)

    def around(
        self,
        x: Tensor,
        attend: Callable[[Tensor], Tensor],
        attention_seed: Tensor | None = None,
        feed_forward_seed: Tensor | None = None,
    ) -> Tensor:
        """The layer around some attention.

        Dropout before the sum over replicas is the same as after it, with one mask for all parts
        and the bias; so two masks need no second sum.

        Args:
            attend: what both branches read -> this replica's part of the attention.
        """
        opened = self.groups.open_sharded(self.norm(x))
        attended = self.dropout(attend(opened), attention_seed)
        fed = self.dropout(self.feed_forward(opened), feed_forward_seed)
        total = x + self.groups.close_sharded(attended + fed)
        bias = self.weight("feed_forward_bias", x.shape[-1:], x.dtype)
        if self.dropout.active:
            ones = popxl.constant(np.ones(x.shape), x.dtype, "ones")
            bias = self.dropout(ones * bias, feed_forward_seed)
        return total + bias
