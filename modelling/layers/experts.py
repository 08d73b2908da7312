"""Mixture-of-experts feed-forward layers.

Shazeer et al., arXiv:1701.06538. No token is dropped: rows are sorted by expert, and each expert
multiplies as many as chose it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import popxl
from modelling.layers.context import BlockContext
from modelling.layers.lora import ExpertAdapter
from modelling.layers.module import Module, cast, fused_parameter, parameter
from modelling.weights.hf_tensor_names import FusedWeights, HfTensorNames
from modelling.weights.mapping import Weight, WeightMapping
from popxl import Tensor, TensorSpec, ops
from popxl_addons.ops.routing import (
    repeat_by_group,
    scale_rows,
    scatter_router_weights,
    sort_by_expert,
    sort_local_experts,
)

Gate = Callable[[Tensor, Tensor], Tensor]
"""(gate, up) -> the inner features of an expert."""


@dataclass(frozen=True)
class ExpertUsage:
    """How experts are used: counts of tokens and sums of probabilities, added up over layers, see
    `popxl_addons.ops.routing.count_expert_usage`.

    Attributes:
        experts: of a layer.
        per_token: that a token works with.
        coefficient: of the loss that balances them (Fedus et al., arXiv:2101.03961); 0: none.
    """

    experts: int
    per_token: int
    router_aux_loss_coef: float = 0.0

    @property
    def spec(self) -> TensorSpec:
        """float32 (2, experts)."""
        return TensorSpec((2, self.experts), popxl.float32)

    def balanced(self, loss: Tensor, expert_usage: Tensor) -> Tensor:
        """The loss with the one that balances experts: their number times the sum of each one's
        share of tokens times its mean probability, over the tokens of all layers that are not
        padding."""
        if not self.router_aux_loss_coef:
            return loss
        counts, probabilities = ops.split(expert_usage, 2, axis=0)
        one = popxl.constant(1, popxl.float32)  # where all is padding
        tokens = ops.maximum(ops.sum(counts) * (1 / self.per_token), one)
        balance = ops.sum(counts * probabilities) * self.experts / (tokens * tokens)
        return loss + balance * self.router_aux_loss_coef


class Router(Module):
    """The experts of each token, and their weights: probabilities over all experts, computed in
    float32, the largest of which are kept.

    Args:
        experts: how many there are.
        per_token: how many a token works with.
        std: of the initial weights.
        normalised: whether the weights of a token add up to 1: they are then a softmax over the
            experts that it chose.
        bias: whether there is one.
    """

    def __init__(
        self,
        experts: int,
        per_token: int,
        std: float,
        normalised: bool,
        bias: bool = False,
        hf_name: str | None = None,
    ) -> None:
        super().__init__(hf_name)
        self.experts, self.per_token, self.normalised = experts, per_token, normalised
        self.has_bias = bias
        self.weight = parameter(experts, self.config.model.hidden_size, std=std)
        if bias:
            self.bias = parameter(experts, std=std)

    def build(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: (tokens, hidden) -> float32 weights and int32 experts, (tokens, per_token), and all
        probabilities, float32 (tokens, experts)."""
        logits = cast(ops.matmul(x, self.weight.transpose((1, 0))), popxl.float32)
        if self.has_bias:
            logits = logits + cast(self.bias, popxl.float32)
        probabilities = ops.softmax(logits, -1)
        weights, topk_experts = ops.topk(
            logits if self.normalised else probabilities, self.per_token, -1, True, True
        )
        if self.normalised:  # by their sum, without its rounding: the weight of one is 1
            weights = ops.softmax(weights, -1)
        return weights, topk_experts, probabilities


@dataclass(frozen=True)
class ExpertNames:
    """Names of experts' weights in files.

    Attributes:
        gate, up, down: of an expert's maps.
        interleaved: whether stacked tensors have rows of gate and up in turn, matrices as (in
            features, out features), and exports too have them stacked, as gpt-oss does.
        stacked_in: name of the module with stacked tensors, if it is not this one's.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    interleaved: bool = False
    stacked_in: str | None = None


class ExpertLinear(Module):
    """A map of each expert; matrices and biases lie one after the other. In files they are modules
    beside this one.

    Args:
        maps: names of all experts' maps in Hugging Face's model.
        shape: of a map's weight.
        std: of the initial weights.
        has_bias: whether maps have one.
        is_out: whether their inputs are the experts' inner features.
    """

    def __init__(
        self, maps: Sequence[str], shape: tuple[int, int], std: float, has_bias: bool, is_out: bool
    ) -> None:
        super().__init__(hf_name="")
        expert_parallel, count = self.config.execution.expert_parallel, len(maps) // (2 - is_out)
        weights = [Weight(f"{name}.weight", shape, std) for name in maps]
        self.weight = fused_parameter(
            weights, 0, transposed=is_out, expert_matrices=count, expert_parallel=expert_parallel
        )
        if has_bias:
            biases = [Weight(f"{name}.bias", shape[:1], 0.0) for name in maps]
            how = {"is_sharded": False} if is_out else {"expert_parallel": expert_parallel}
            self.bias = fused_parameter(biases, 0, **how)

    def is_quantizable(self, row: WeightMapping) -> bool:
        return row.expert_matrices > 0


class Experts(Module):
    """The experts' matrices. It may be given adapters.

    The inner features of each expert are sharded over tensor parallelism, or whole experts are
    (`execution.expert_parallel`).

    Args:
        count: of all experts.
        intermediate_size: features inside an expert.
        gate: see `Gate`.
        std: of the initial weights.
        bias: whether maps have one.
        held: how many of them there are here; None: all.

    Attributes:
        own: experts on this replica.
        part: inner features of each on this replica.
    """

    gate_up_adapter: ExpertAdapter | None = None
    down_adapter: ExpertAdapter | None = None

    def __init__(
        self,
        count: int,
        intermediate_size: int,
        gate: Gate,
        std: float,
        bias: bool = False,
        names: ExpertNames = ExpertNames(),
        held: int | None = None,
    ) -> None:
        super().__init__()
        execution, hidden = self.config.execution, self.config.model.hidden_size
        parts = execution.tensor_parallel
        self.gate, self.has_bias, self.names = gate, bias, names
        self.count, self.held = count, held or count
        self.shares_experts = execution.expert_parallel and parts > 1 and held is None
        self.own = self.held // parts if self.shares_experts else self.held
        self.part = intermediate_size if self.shares_experts else intermediate_size // parts
        inner = intermediate_size
        into = [name for names in self._into(self.held) for name in names]
        self.gate_up = ExpertLinear(into, (inner, hidden), std, bias, is_out=False)
        out = [name for names in self._out(self.held) for name in names]
        self.down = ExpertLinear(out, (hidden, inner), std, bias, is_out=True)

    # ---- names ----------------------------------------------------------------------------------
    def _into(self, count: int) -> list[tuple[str, str]]:
        return [(f"{e}.{self.names.gate}", f"{e}.{self.names.up}") for e in range(count)]

    def _out(self, count: int) -> list[tuple[str]]:
        return [(f"{e}.{self.names.down}",) for e in range(count)]

    def file_names(self, hf_path: str) -> HfTensorNames:
        """Older or newer files have those of all experts stacked in one tensor."""
        of, parent = self.names, hf_path.rpartition(".")[0]
        if of.stacked_in is not None:
            parent = f"{parent.rpartition('.')[0]}.{of.stacked_in}"
        joined: dict[str, FusedWeights] = {}
        for kind in ("weight", "bias")[: 1 + self.has_bias]:
            end = "_bias" if kind == "bias" else ""
            for title, maps in (("gate_up_proj", self._into), ("down_proj", self._out)):
                groups = tuple(
                    tuple(f"{hf_path}.{name}.{kind}" for name in names)
                    for names in maps(self.count)
                )
                joined[f"{parent}.experts.{title}{end}"] = FusedWeights(
                    groups,
                    stack=0,
                    interleaved=of.interleaved and title == "gate_up_proj",
                    transposed=of.interleaved and kind == "weight",
                    in_exports=of.interleaved,
                )
        return HfTensorNames(fused=joined)

    # ---- arithmetic -----------------------------------------------------------------------------
    def build(
        self, tokens: Tensor, weights: Tensor, topk_experts: Tensor, routes: tuple[Tensor, ...]
    ) -> Tensor:
        """The sum over the experts held here of down_e(gate(gate_e x, up_e x)), by their weights:
        (tokens, hidden), on all replicas.

        Args:
            tokens: (tokens, hidden).
            weights, chosen: see `Router.build`; numbers among these experts, and others besides.
            routes: see `sort_by_expert`.
        """
        x, own = (self.groups.copy_to_tp(t) for t in (tokens, weights))
        y = self.groups.reduce_from_tp(self._partial(x, own, routes))
        return y + self._biases(weights, topk_experts, tokens) if self.has_bias else y

    def routes(self, topk_experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The part of `sort_by_expert` that concerns this replica's experts."""
        order, places, sizes = sort_by_expert(self._own_first(topk_experts), experts=self.count)
        return order, places, sizes[: self.own] if self.shares_experts else sizes

    def _own_first(self, topk_experts: Tensor) -> Tensor:
        """The numbers of experts, counted on from this replica's first one: its rows come first."""
        if not self.shares_experts:
            return topk_experts
        count = popxl.constant(self.count, popxl.int32, "experts")
        return ops.fmod(topk_experts + (count - self.groups.tp_rank() * self.own), count)

    def _partial(self, x: Tensor, weights: Tensor, routes: tuple[Tensor, ...]) -> Tensor:
        """This replica's part of the sum, from its features of each expert, or from its experts:
        the rows of others have no product and are zeros.

        Inner features are weighed, not what is made of them: they are fewer, and gradients then
        ask for no product again.
        """
        into, out = self.gate_up.weight, self.down.weight
        order, places, sizes = routes
        rows, usual_rows = order / weights.shape[1], self._usual_rows(weights)
        both = ops.grouped_matmul(
            x, into, sizes, transpose=True, expected_rows=usual_rows, rows=rows
        )
        if self.gate_up_adapter is not None:
            both = self.gate_up_adapter(x, both, sizes, usual_rows, rows)
        if self.has_bias:
            bias = self.gate_up.bias.reshape((self.own, 2 * self.part))
            both = both + repeat_by_group(bias, sizes, rows=rows.shape[0])
        inner = scale_rows(self.gate(*ops.split(both, 2, axis=-1)), weights, order, places)
        y = ops.grouped_matmul(
            inner, out, sizes, expected_rows=usual_rows, rows=rows, into=x.shape[0]
        )
        return (
            y if self.down_adapter is None else self.down_adapter(inner, y, sizes, usual_rows, rows)
        )

    def _usual_rows(self, weights: Tensor) -> int | None:
        """How many rows are of this replica's experts, if all are chosen alike; None: all are."""
        return None if self.own == self.count else weights.nelms * self.own // self.count

    def _biases(self, weights: Tensor, topk_experts: Tensor, x: Tensor) -> Tensor:
        """What the biases of a token's experts add, by their weights: (tokens, hidden)."""
        shares = scatter_router_weights(weights, topk_experts, experts=self.held)
        return ops.matmul(cast(shares, x.dtype), self.down.bias.reshape((self.held, -1)))


class MoE(Module):
    """A router and its experts, in place of a feed-forward layer.

    Args:
        router: it is `gate` in most of Hugging Face's models.
        shared: a feed-forward layer of all tokens, `build(x)`, if there is one; what it gives is
            multiplied by sigmoid(x @ shared_expert_gate), whose initial weights have `std`.
        router_alias: another name of the router's weight, from the layer's.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: Module | None = None,
        std: float = 0.0,
        hf_name: str | None = None,
        router_alias: str | None = None,
    ) -> None:
        super().__init__(hf_name)
        self.gate, self.experts, self._router_alias = router, experts, router_alias
        self.has_shared = shared is not None
        if shared is not None:
            self.shared_expert, self.shared_expert_gate = shared, SharedExpertGate(std)

    def file_names(self, hf_path: str) -> HfTensorNames:
        """Newer files may have another name for the router."""
        if self._router_alias is None:
            return HfTensorNames()
        own = f"{hf_path}.{self.gate.hf_name or 'gate'}.weight"
        return HfTensorNames(aliases={f"{hf_path.rpartition('.')[0]}.{self._router_alias}": own})

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor | None:
        """x: (..., hidden) -> what experts give, of the same shape; None where that is left to
        phases of their own, see `Context.defer_experts`."""
        tokens = x.reshape((-1, x.shape[-1]))
        weights, topk_experts, probabilities = self.gate(tokens)
        if ctx.routes_only:
            y = None
            ctx.defer_experts(normed=x, weights=weights, topk_experts=topk_experts)
        else:
            y = self.experts(tokens, weights, topk_experts, self.experts.routes(topk_experts))
        if self.has_shared:
            shared = self.shared_expert_gate(tokens) * self.shared_expert(tokens, ctx)
            y = shared if y is None else y + shared
        ctx.count(topk_experts, probabilities)
        return None if y is None else y.reshape(x.shape)

    def expert_input_specs(self, x: TensorSpec) -> Mapping[str, TensorSpec]:
        """Specs of what `Context.defer_experts` is given, for an x."""
        choices = (math.prod(x.shape[:-1]), self.gate.per_token)
        return {
            "normed": x,
            "topk_weights": TensorSpec(choices, popxl.float32),
            "topk_experts": TensorSpec(choices, popxl.int32),
        }


class SharedExpertGate(Module):
    """sigmoid(x @ weight), (tokens, 1)."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.weight = parameter(1, self.config.model.hidden_size, std=std)

    def build(self, x: Tensor) -> Tensor:
        """x: (tokens, hidden)."""
        half = ops.matmul(x, self.weight.transpose((1, 0))) * 0.5
        return (ops.tanh(half) + 1.0) * 0.5  # the sigmoid


class _HeldExperts(Module):
    """The place of experts in a block's `mlp`."""

    def __init__(self, experts: Experts, hf_name: str | None) -> None:
        super().__init__(hf_name)
        self.experts = experts


class ExpertGroup(Module):
    """Neighbouring experts of a layer, `execution.expert_groups` of which are all: a phase of its
    own in training.

    Args:
        experts: which has so many of them.
        hf_name: of the layer's `mlp`.
    """

    def __init__(self, experts: Experts, hf_name: str | None = None) -> None:
        super().__init__()
        self.mlp = _HeldExperts(experts, hf_name)

    def build(
        self,
        normed: Tensor,
        topk_weights: Tensor,
        topk_experts: Tensor,
        number: Tensor,
        seed: Tensor | None = None,
    ) -> Tensor:
        """The output of these experts, to be added to x, of its shape.

        Args:
            normed, topk_weights, topk_experts: see `Context.defer_experts`.
            number: of the group, int32 scalar.
        """
        experts = self.mlp.experts
        own = topk_experts - number * experts.held
        routes = sort_local_experts(own, experts=experts.held)
        tokens = normed.reshape((-1, normed.shape[-1]))
        return experts(tokens, topk_weights, own, routes).reshape(normed.shape)
