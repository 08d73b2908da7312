"""The layer of Llama-shaped models, attention and then a gated feed-forward or experts, and
the head.

Attention is causal, with grouped heads of keys and values: Ainslie et al., arXiv:2305.13245
(groups); Beltagy et al., arXiv:2004.05150 (windows); Henry et al., arXiv:2010.04245 (norms of
queries and keys).
"""

from __future__ import annotations

from typing import Any

import popxl
from config.llama import LlamaConfig, LlamaModel
from modelling.layers import (
    NO_SEEDS,
    USAGE,
    Axes,
    Clamp,
    DecoderAttention,
    DecoderLayer,
    Dropout,
    Experts,
    GatedFeedForward,
    Groups,
    Linear,
    LMHeadLoss,
    Map,
    RMSNorm,
    Router,
    Scores,
    Seeds,
    ShardedRMSNorm,
    Tables,
    add_residual,
    cast,
    heads_first,
    rotate_halves,
)
from modelling.llama.rotary import rotary_tables
from popxl import Tensor, TensorSpec, ops
from popxl_addons.ops.routing import count_experts


class SelfAttention(DecoderAttention):
    """This replica's heads, inside a sharded computation.

    Variables: `q.weight` (hidden, features on a replica), `kv.weight` (hidden, 2 * those of keys);
    `q.bias` and `kv.bias`, `q_norm.weight` and `k_norm.weight` where there are such;
    `output.weight`; `sinks` where there are such.

    Args:
        kind: of the layer, see `config.llama`.
        room: positions after the sequence, in generation.
    """

    def __init__(self, config: LlamaConfig, groups: Groups, kind: str, room: int = 0) -> None:
        model, attention = config.model, config.model.attention
        scale = attention.head_size**-0.5 if attention.scale is None else attention.scale
        window = attention.window_of(kind)
        super().__init__(
            config,
            groups,
            attention.heads,
            attention.head_size,
            Scores(scale, attention.cap, causal=True, window=window, sinks=attention.sinks),
            config.execution.attention_slices,
            attention.key_value_heads,
        )
        self.model, self.kind = model, kind
        self.positions = model.sequence_length + room
        bias, keys = attention.input_bias, self.key_heads * attention.head_size
        self.q = Linear(self.features, groups.sharded, bias, self.few_bits)
        self.kv = Linear(2 * keys, groups.held_by(self.holders), bias, self.few_bits)
        if attention.norms is not None:
            self.q_norm, self.k_norm = self._norms()

    def _norms(self) -> tuple[RMSNorm, RMSNorm]:
        """The norms of queries and of keys."""
        model, attention, groups = self.model, self.model.attention, self.groups
        eps = model.norm_epsilon
        if attention.norms == "heads":
            norm, other = (RMSNorm(eps, model.norms_from_one, groups) for _ in range(2))
            return norm, other
        size = attention.head_size
        return (
            ShardedRMSNorm(eps, attention.heads * size, groups),
            ShardedRMSNorm(eps, attention.key_value_heads * size, groups, self.holders),
        )

    def tables(self, positions: int) -> Tables | None:
        """See `DecoderAttention`."""
        return rotary_tables(self.model, self.kind, positions, self.positions)

    def _keys_and_values(self, x: Tensor) -> list[Tensor]:
        """Each (batch, n, features of the keys on a replica).

        Replicas that hold the same heads attend to them with some of the queries each. The sum of
        their gradients enters the product's, so that FP8 rounds the same for every tensor
        parallelism.
        """
        kv = self.kv(self.groups.share_held(x, self.holders))
        return ops.split(self.groups.open_held(kv, self.holders), 2, axis=-1)

    def project(self, x: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor, Tensor]:
        """See `DecoderAttention`."""
        norms = self.model.attention.norms
        q, (k, v) = self.q(x), self._keys_and_values(x)
        if norms == "projections":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = self.of_heads(q), *(self.of_heads(t, self.key_heads) for t in (k, v))
        if norms == "heads":
            q, k = self.q_norm(q), self.k_norm(k)
        if tables is not None:
            rotated, (sin, cos, *growth) = self.model.attention.rotated, tables
            q, k = (rotate_halves(t, sin, cos, rotated) for t in (q, k))
            for factor in growth:
                q = q * cast(factor.reshape((*factor.shape, 1)), q.dtype)
        return heads_first(q), heads_first(k), heads_first(v)


BRANCHES = ("attention", "feed_forward")


def experts_of(model: LlamaModel, groups: Groups, **some: Any) -> Experts:
    """A layer's experts.

    Args:
        some: `held` or `expert_parallel`, see `Experts`.
    """
    of, packed, activation = model.experts, model.few_bits_in_layers, model.activation
    router = Router(of.count, of.chosen, of.normalised, of.biases)
    clamp = Clamp(of.gate_limit, of.gate_slope) if of.gate_limit else None
    shared = None
    if of.shared_size is not None:
        shared = GatedFeedForward(model.hidden_size, of.shared_size, groups, packed, activation)
    return Experts(router, model.inner_size, groups, activation, shared, packed, clamp, **some)


class Block(DecoderLayer):
    """x + branch(x) for both branches, of which each has a norm before it, after it, or both.

    Variables: those of `attention` and `feed_forward`; `attention_norm.weight` and
    `feed_forward_norm.weight` of norms before the branches, `attention_end_norm.weight` and
    `feed_forward_end_norm.weight` of those after them; `attention_bias` and `feed_forward_bias`
    (hidden,), where the branches end with one.

    Args:
        kind: of the layer, see `config.llama`.
        room: positions after the sequence, in generation.
    """

    def __init__(self, config: LlamaConfig, kind: str, room: int = 0) -> None:
        super().__init__(config)
        self.model = model = config.model
        for branch in BRANCHES:
            if model.norms != "after":
                setattr(self, f"{branch}_norm", self._norm())
            if model.norms != "before":
                setattr(self, f"{branch}_end_norm", self._norm())
        self.attention = SelfAttention(config, self.groups, kind, room)
        self.feed_forward = self._feed_forward(config.execution.expert_parallel)

    def _feed_forward(self, expert_parallel: bool) -> GatedFeedForward | Experts:
        model, groups = self.model, self.groups
        if model.experts.count:
            return experts_of(model, groups, expert_parallel=expert_parallel)
        hidden, inner, packed = model.hidden_size, model.inner_size, model.few_bits_in_layers
        bias = model.feed_forward_bias
        return GatedFeedForward(hidden, inner, groups, packed, model.activation, bias)

    def _norm(self) -> RMSNorm:
        return RMSNorm(self.model.norm_epsilon, self.model.norms_from_one)

    def around(self, x: Tensor, attend: Map, seeds: Seeds = NO_SEEDS) -> Tensor:
        """See `DecoderLayer`."""
        x, bias = self.attended(x, attend, seeds), self.model.feed_forward_bias
        return self._add(x, "feed_forward", self.feed_forward.whole, bias, seeds[1])

    def attended(self, x: Tensor, attend: Map, seeds: Seeds) -> Tensor:
        """The first half of `around`."""
        bias = self.model.attention.output_bias
        return self._add(x, "attention", lambda t: self._whole(attend, t), bias, seeds[0])

    def _whole(self, part: Map, x: Tensor) -> Tensor:
        """What the members of a tensor-parallel group give together."""
        return self.groups.reduce_from_tp(part(self.groups.copy_to_tp(x)))

    def _add(self, x: Tensor, branch: str, part: Map, bias: bool, seed: Tensor | None) -> Tensor:
        """Add a branch to x."""
        before, after = (getattr(self, f"{branch}{n}_norm", None) for n in ("", "_end"))
        y = part(x if before is None else before(x))
        if bias:
            y = y + self.weight(f"{branch}_bias", x.shape[-1:], x.dtype)
        y = self.dropout(y if after is None else after(y), seed)
        return add_residual(
            x, y if self.model.residual_scale == 1 else y * self.model.residual_scale
        )


class CountingBlock(Block):
    """A block with experts, which adds up how they are used, see `count_experts`."""

    feed_forward: Experts

    def __init__(self, config: LlamaConfig, kind: str, room: int = 0) -> None:
        super().__init__(config, kind, room)
        self.added_up = TensorSpec((2, self.model.experts.count), popxl.float32)
        self.sum_is_learned = self.model.experts.balance > 0
        self.axes = Axes.of(config)

    def build(  # type: ignore[override]
        self,
        x: Tensor,
        usage: Tensor,
        segments: Tensor,
        starts: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x and the usage before the layer -> those after it.

        Args:
            segments: int32 (batch, length), 0 where a token is padding, which does not count.
        """
        y = super().build(x, starts, seed)
        return y, self.counted(usage, segments)

    def counted(self, usage: Tensor, segments: Tensor) -> Tensor:
        """The usage after the layer, which has been built."""
        chosen, probabilities = self.feed_forward.routing
        return usage + count_experts(chosen, probabilities, self.axes.swap(segments))


class DecoderHead(LMHeadLoss):
    """The final norm, logits and the loss."""

    def __init__(self, config: LlamaConfig) -> None:
        self.model = model = config.model
        super().__init__(
            config,
            RMSNorm(model.norm_epsilon, model.norms_from_one),
            Dropout(),
            bias=False,
            tied=model.embedding.tied,
            scale=1 / model.logits_divisor,
            cap=model.logits_cap,
        )


class CountingHead(DecoderHead):
    """A head that tells how experts are used, and adds the loss which balances them (Fedus et al.,
    arXiv:2101.03961)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.told = (*self.told, USAGE)

    def build(  # type: ignore[override]
        self, x: Tensor, usage: Tensor, *inputs: Tensor, seed: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Args: `usage`: see `count_experts`, added up over layers; others: see `LMHeadLoss`."""
        found, factor = super().build(x, *inputs, seed=seed), self.model.experts.balance
        loss, *sums = found if isinstance(found, tuple) else (found,)
        if factor:
            loss = loss + self._balance(usage) * factor
        return (loss, *sums, usage)

    def _balance(self, usage: Tensor) -> Tensor:
        """The number of experts times the sum of each one's share of tokens times its mean
        probability, over the tokens of all layers that are not padding."""
        experts = self.model.experts
        counts, probabilities = ops.split(usage, 2, axis=0)
        one = popxl.constant(1, popxl.float32)  # where all is padding
        tokens = ops.maximum(ops.sum(counts) * (1 / experts.chosen), one)
        return ops.sum(counts * probabilities) * experts.count / (tokens * tokens)
