"""Feed-forward layers of which each token works with a few: mixtures of experts.

Shazeer et al., arXiv:1701.06538. No token is dropped: rows are sorted by expert, and each expert
multiplies as many as chose it.
"""

from __future__ import annotations

import popxl
from config.model import FewBits
from modelling.layers.feed_forward import Activation, GatedFeedForward, activation_of
from modelling.layers.layer import Layer, cast
from modelling.layers.parallel import Groups
from popxl import Tensor, TensorSpec, ops
from popxl_addons.ops.routing import rows_by_expert, sum_rows, take_rows, weigh_rows


class Router(Layer):
    """The experts of each token, and their weights: probabilities over all experts, computed in
    float32, the largest of which are kept.

    Variables: `weight` (experts, hidden), the same on all replicas.

    Args:
        experts: how many there are.
        chosen: how many a token works with.
        normalised: whether the weights of a token add up to 1.
    """

    def __init__(self, experts: int, chosen: int, normalised: bool) -> None:
        super().__init__()
        self.experts, self.chosen, self.normalised = experts, chosen, normalised

    def build(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: (tokens, hidden) -> float32 weights and int32 experts, (tokens, chosen), and all
        probabilities, float32 (tokens, experts)."""
        weight = self.weight("weight", (self.experts, x.shape[-1]), x.dtype)
        logits = cast(ops.matmul(x, weight.transpose((1, 0))), popxl.float32)
        probabilities = ops.softmax(logits, -1)
        weights, chosen = ops.topk(probabilities, self.chosen, -1, True, True)
        if self.normalised:
            weights = weights / ops.sum(weights, -1, keepdims=True)
        return weights, chosen, probabilities

    @property
    def usage_spec(self) -> TensorSpec:
        """The spec of `Experts.usage`."""
        return TensorSpec((2, self.experts), popxl.float32)


class Experts(Layer):
    """The sum of wo_e(activation(gate_e x) * up_e x) over a token's experts e, by their weights.

    The inner features of each expert are cut over tensor parallelism. Matrices of all experts lie
    one after the other, so that each is in one piece.

    Variables: those of `router`; `wi.weight` (experts * 2 * inner / tensor_parallel, hidden), of
    each expert a replica's part of gate and then of up; `wo.weight`
    (experts * inner / tensor_parallel, hidden). Those of `shared`, a feed-forward layer that all
    tokens use, times sigmoid(x @ `shared_gate.weight`), (1, hidden), if there is one.

    Attributes:
        usage: of the tokens that went through last, float32 (2, experts): how many chose each
            expert, and the sum of each one's probabilities.

    Args:
        inner: features inside an expert.
        shared: those of the shared one; None: there is none.
        few_bits: of the shared one, see `Linear`.
        held: how many experts it has matrices of; None: all.
    """

    def __init__(
        self,
        router: Router,
        hidden: int,
        inner: int,
        groups: Groups,
        activation: Activation,
        shared: int | None = None,
        few_bits: FewBits | None = None,
        held: int | None = None,
    ) -> None:
        super().__init__()
        self.router, self.groups = router, groups
        self.held = held or router.experts
        self.part = groups.shard(inner, "inner features of an expert")
        self.activation = activation_of(activation)
        self.shared: GatedFeedForward | None = None
        if shared is not None:
            self.shared = GatedFeedForward(hidden, shared, groups, few_bits, activation)

    def whole(self, x: Tensor) -> Tensor:
        """(..., hidden) -> the same shape, on all replicas."""
        return self(x)

    def build(self, x: Tensor) -> Tensor:
        """See `whole`."""
        tokens = x.reshape((-1, x.shape[-1]))
        weights, _, routes = self.route(tokens)
        y = self.mixture(tokens, weights, routes)
        if self.shared is not None:
            y = y + self.of_shared(tokens)
        return y.reshape(x.shape)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """(tokens, hidden) -> the router's weights and choices, and what `rows_by_expert` says."""
        weights, chosen, probabilities = self.router(tokens)
        routes = rows_by_expert(chosen, experts=self.router.experts)
        counts = ops.cast(routes[2], popxl.float32)
        self.usage = ops.concat([t.reshape((1, -1)) for t in (counts, ops.sum(probabilities, 0))])
        return weights, chosen, routes

    def mixture(self, tokens: Tensor, weights: Tensor, routes: tuple[Tensor, ...]) -> Tensor:
        """The sum over the experts that it has, (tokens, hidden), on all replicas."""
        inside, weights = (self.groups.copy_to_tp(t) for t in (tokens, weights))
        return self.groups.reduce_from_tp(self._mixture(inside, weights, routes))

    def of_shared(self, tokens: Tensor) -> Tensor:
        """What the shared one adds, (tokens, hidden)."""
        assert self.shared is not None
        return self._shared_gate(tokens) * self.shared.whole(tokens)

    def _mixture(self, x: Tensor, weights: Tensor, routes: tuple[Tensor, ...]) -> Tensor:
        """This replica's part of the sum, from its features of each expert.

        Inner features are weighed, not what is made of them: they are fewer, and gradients then
        ask for no product again.
        """
        wi, wo = self._matrices("wi", 2 * self.part, x), self._matrices("wo", self.part, x)
        order, places, sizes = routes
        rows = take_rows(x, order, places)
        usual = self._usual_rows(weights)
        both = ops.grouped_matmul(rows, wi, sizes, transpose=True, usual=usual)
        gate, up = ops.split(both, 2, axis=-1)
        inner = weigh_rows(self.activation(gate) * up, weights, order, places)
        return sum_rows(ops.grouped_matmul(inner, wo, sizes, usual=usual), order, places)

    def _usual_rows(self, weights: Tensor) -> int | None:
        """How many rows are of the experts that it has, if all are chosen alike; None: all are."""
        every = self.router.experts
        return None if self.held == every else weights.nelms * self.held // every

    def _matrices(self, name: str, rows: int, x: Tensor) -> Tensor:
        shape = (self.held * rows, x.shape[-1])
        return self.weight(f"{name}.weight", shape, x.dtype, self.groups.sharded)

    def _shared_gate(self, x: Tensor) -> Tensor:
        weight = self.weight("shared_gate.weight", (1, x.shape[-1]), x.dtype)
        half = ops.matmul(x, weight.transpose((1, 0))) * 0.5
        return (ops.tanh(half) + 1.0) * 0.5  # the sigmoid
