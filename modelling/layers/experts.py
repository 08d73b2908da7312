"""Feed-forward layers of which each token works with a few: mixtures of experts.

Shazeer et al., arXiv:1701.06538. No token is dropped: rows are sorted by expert, and each expert
multiplies as many as chose it.
"""

from __future__ import annotations

from dataclasses import dataclass

import popxl
from config.model import FewBits
from modelling.layers.feed_forward import Activation, GatedFeedForward, activation_of
from modelling.layers.layer import Layer, cast
from modelling.layers.low_rank_experts import ExpertAdapter
from modelling.layers.parallel import Groups
from popxl import Tensor, ops
from popxl_addons.ops.routing import (
    rows_by_expert,
    rows_of_groups,
    spread_weights,
    weigh_rows,
)


class Router(Layer):
    """The experts of each token, and their weights: probabilities over all experts, computed in
    float32, the largest of which are kept.

    Variables: `weight` (experts, hidden), and `bias` (experts,) if there is one, the same on all
    replicas.

    Args:
        experts: how many there are.
        chosen: how many a token works with.
        normalised: whether the weights of a token add up to 1: they are then a softmax over the
            experts that it chose.
        bias: whether there is one.
    """

    def __init__(self, experts: int, chosen: int, normalised: bool, bias: bool = False) -> None:
        super().__init__()
        self.experts, self.chosen, self.normalised = experts, chosen, normalised
        self.bias = bias

    def build(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: (tokens, hidden) -> float32 weights and int32 experts, (tokens, chosen), and all
        probabilities, float32 (tokens, experts)."""
        weight = self.weight("weight", (self.experts, x.shape[-1]), x.dtype)
        logits = cast(ops.matmul(x, weight.transpose((1, 0))), popxl.float32)
        if self.bias:
            logits = logits + cast(self.weight("bias", weight.shape[:1], x.dtype), popxl.float32)
        probabilities = ops.softmax(logits, -1)
        weights, chosen = ops.topk(
            logits if self.normalised else probabilities, self.chosen, -1, True, True
        )
        if self.normalised:  # by their sum, without its rounding: the weight of one is 1
            weights = ops.softmax(weights, -1)
        return weights, chosen, probabilities


@dataclass(frozen=True)
class Clamp:
    """A gate that is clamped: gate * sigmoid(slope * gate) * (up + 1), of a gate at most `limit`
    and up within +-`limit`, as gpt-oss has it (arXiv:2508.10925)."""

    limit: float
    slope: float

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """In float32."""
        low = ops.clamp(cast(gate, popxl.float32), max=self.limit)
        within = ops.clamp(cast(up, popxl.float32), -self.limit, self.limit)
        inner = ops.swish(low * self.slope) * (within + 1.0) * (1 / self.slope)
        return cast(inner, gate.dtype)


class Experts(Layer):
    """The sum of wo_e(activation(gate_e x) * up_e x) over a token's experts e, by their weights.

    The inner features of each expert are cut over tensor parallelism, or whole experts are shared
    out. Matrices of experts lie one after the other, so that each is in one piece.

    Variables: those of `router`; `wi.weight` (experts * 2 * inner / tensor_parallel, hidden), of
    each expert a replica's part of gate and then of up, or of each of its experts the whole;
    `wo.weight` (experts * inner / tensor_parallel, hidden). If the router has a bias, `wi.bias`
    (experts * 2 * inner / tensor_parallel,) likewise and `wo.bias` (experts * hidden,), the same on
    all replicas. Those of `shared`, a feed-forward layer that all tokens use, times
    sigmoid(x @ `shared_gate.weight`), (1, hidden), if there is one. Those of `wi_adapter` and
    `wo_adapter`, if it is given them (`adapt`).

    Attributes:
        held: how many experts it has matrices of, `own` of them on this replica.
        part: inner features of each on this replica.
        routing: of the tokens that went through last, their experts and the probabilities of all,
            see `Router.build`.

    Args:
        inner: features inside an expert.
        shared: the one that all tokens use.
        few_bits: of the experts' matrices, see `Linear`.
        clamp: of the gates; None: they are activation(gate) * up.
        held: None: all.
        expert_parallel: whether each member of a tensor-parallel group has whole experts.
    """

    wi_adapter: ExpertAdapter | None = None
    wo_adapter: ExpertAdapter | None = None

    def __init__(
        self,
        router: Router,
        inner: int,
        groups: Groups,
        activation: Activation,
        shared: GatedFeedForward | None = None,
        few_bits: FewBits | None = None,
        clamp: Clamp | None = None,
        held: int | None = None,
        expert_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.router, self.groups, self.clamp, self.few_bits = router, groups, clamp, few_bits
        self.held = held or router.experts
        self.expert_parallel = expert_parallel and groups.tensor_parallel > 1
        self.own, self.part = self.held, inner
        if self.expert_parallel:
            self.own = groups.shard(self.held, "experts")
        else:
            self.part = groups.shard(inner, "inner features of an expert")
        self.activation, self.shared = activation_of(activation), shared

    def whole(self, x: Tensor) -> Tensor:
        """(..., hidden) -> the same shape, on all replicas."""
        return self(x)

    def build(self, x: Tensor) -> Tensor:
        """See `whole`."""
        tokens = x.reshape((-1, x.shape[-1]))
        y = self.mixture(tokens, *self.route(tokens))
        if self.shared is not None:
            y = y + self.of_shared(tokens)
        return y.reshape(x.shape)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """(tokens, hidden) -> the router's weights and choices, and what `rows_by_expert` says."""
        weights, chosen, probabilities = self.router(tokens)
        order, places, sizes = rows_by_expert(self._own_first(chosen), experts=self.router.experts)
        self.routing = chosen, probabilities
        if self.expert_parallel:
            sizes = sizes[: self.own]
        return weights, chosen, (order, places, sizes)

    def _own_first(self, chosen: Tensor) -> Tensor:
        """The numbers of experts, counted on from this replica's first one: its rows come first."""
        if not self.expert_parallel:
            return chosen
        count = popxl.constant(self.router.experts, popxl.int32, "experts")
        return ops.fmod(chosen + (count - self.groups.rank() * self.own), count)

    def mixture(
        self, tokens: Tensor, weights: Tensor, chosen: Tensor, routes: tuple[Tensor, ...]
    ) -> Tensor:
        """The sum over the experts that it has, (tokens, hidden), on all replicas.

        Args:
            chosen: numbers among these experts; a token may have chosen others besides.
        """
        x, own = (self.groups.copy_to_tp(t) for t in (tokens, weights))
        y = self.groups.reduce_from_tp(self._mixture(x, own, routes))
        return y + self._biases(weights, chosen, tokens) if self.router.bias else y

    def of_shared(self, tokens: Tensor) -> Tensor:
        """What the shared one adds, (tokens, hidden)."""
        assert self.shared is not None
        return self._shared_gate(tokens) * self.shared.whole(tokens)

    def _mixture(self, x: Tensor, weights: Tensor, routes: tuple[Tensor, ...]) -> Tensor:
        """This replica's part of the sum, from its features of each expert, or from its experts:
        the rows of others have no product and are zeros.

        Inner features are weighed, not what is made of them: they are fewer, and gradients then
        ask for no product again.
        """
        wi, wo = self._matrices("wi", 2 * self.part, x, 1), self._matrices("wo", self.part, x, 0)
        order, places, sizes = routes
        rows, usual = order / weights.shape[1], self._usual_rows(weights)
        both = ops.grouped_matmul(x, wi, sizes, transpose=True, usual=usual, rows=rows)
        if self.wi_adapter is not None:
            both = self.wi_adapter(x, both, sizes, usual, rows)
        if self.router.bias:
            both = both + self._bias_rows(rows.shape[0], sizes, x.dtype)
        inner = weigh_rows(self._gated(both), weights, order, places)
        y = ops.grouped_matmul(inner, wo, sizes, usual=usual, rows=rows, into=x.shape[0])
        return y if self.wo_adapter is None else self.wo_adapter(inner, y, sizes, usual, rows)

    def _usual_rows(self, weights: Tensor) -> int | None:
        """How many rows are of this replica's experts, if all are chosen alike; None: all are."""
        every = self.router.experts
        return None if self.own == every else weights.nelms * self.own // every

    def _bias_rows(self, rows: int, sizes: Tensor, dtype: popxl.dtype) -> Tensor:
        """The bias of each row's expert."""
        count = self.own
        bias = self.weight("wi.bias", (count * 2 * self.part,), dtype, self.groups.sharded)
        return rows_of_groups(bias.reshape((count, 2 * self.part)), sizes, rows=rows)

    def _gated(self, both: Tensor) -> Tensor:
        gate, up = ops.split(both, 2, axis=-1)
        if self.clamp is not None:
            return self.clamp.gated(gate, up)
        return self.activation(gate) * up

    def _biases(self, weights: Tensor, chosen: Tensor, x: Tensor) -> Tensor:
        """What the biases of a token's experts add, by their weights: (tokens, hidden)."""
        experts = self.held
        bias = self.weight("wo.bias", (experts * x.shape[-1],), x.dtype)
        shares = spread_weights(weights, chosen, experts=experts)
        return ops.matmul(cast(shares, x.dtype), bias.reshape((experts, -1)))

    def _matrices(self, name: str, rows: int, x: Tensor, axis: int) -> Tensor:
        """The matrices of this replica's experts; `axis` is that of the input features."""
        shape, group = (self.own * rows, x.shape[-1]), self.groups.sharded
        return self.packed_weight(f"{name}.weight", shape, x.dtype, group, self.few_bits, axis)

    def _shared_gate(self, x: Tensor) -> Tensor:
        weight = self.weight("shared_gate.weight", (1, x.shape[-1]), x.dtype)
        half = ops.matmul(x, weight.transpose((1, 0))) * 0.5
        return (ops.tanh(half) + 1.0) * 0.5  # the sigmoid
