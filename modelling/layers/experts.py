"""Mixture-of-experts feed-forward layers (Shazeer et al., arXiv:1701.06538).

No token is dropped: the rows of x are sorted by expert, and a grouped product multiplies those of
each expert by its matrix.

Shapes: k experts of a token (`num_experts_per_tok`); rows = tokens * k, a token at one of its
    experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import popxl
from modelling.layers.block_context import BlockContext
from modelling.layers.lora import ExpertAdapter
from modelling.layers.module import Module, cast_if_needed, fused_parameter, parameter
from modelling.weights.hf_tensor_names import FusedWeights, HfTensorNames
from modelling.weights.weight_mapping import Weight, WeightMapping
from popxl import Tensor, TensorSpec, ops
from popxl_addons.ops.routing import (
    repeat_by_group,
    scale_rows,
    scatter_router_weights,
    sort_by_expert,
    sort_local_experts,
)

GatedActivation = Callable[[Tensor, Tensor], Tensor]
"""(gate, up) -> the input of an expert's down projection, all (rows, features)."""


@dataclass(frozen=True)
class ExpertUsage:
    """Counts the tokens that are routed to each expert, for metrics and the load-balancing loss.

    Attributes:
        num_experts: of a layer.
        num_experts_per_tok: experts of a token.
        router_aux_loss_coef: of the load-balancing loss (Fedus et al., arXiv:2101.03961); 0: none.
    """

    num_experts: int
    num_experts_per_tok: int
    router_aux_loss_coef: float = 0.0

    @property
    def spec(self) -> TensorSpec:
        """Spec of the usage tensor, float32 (2, num_experts): token counts, probability sums."""
        return TensorSpec((2, self.num_experts), popxl.float32)

    def add_load_balancing_loss(self, loss: Tensor, expert_usage: Tensor) -> Tensor:
        """Adds the loss num_experts * sum(share of tokens * mean router probability).

        Both are over the tokens of all layers without padding.

        Args:
            loss: float32 scalar.
            expert_usage: summed over layers, see `spec`.
        """
        if not self.router_aux_loss_coef:
            return loss
        counts, probabilities = ops.split(expert_usage, 2, axis=0)
        one = popxl.constant(1, popxl.float32)  # if all is padding
        tokens = ops.maximum(ops.sum(counts) * (1 / self.num_experts_per_tok), one)
        balance = ops.sum(counts * probabilities) * self.num_experts / (tokens * tokens)
        return loss + balance * self.router_aux_loss_coef


class Router(Module):
    """Chooses the top-k experts of each token and computes their weights.

    Weights are softmax probabilities over all experts, in float32.

    Args:
        num_experts: of the layer.
        num_experts_per_tok: k.
        std: of the initial weights.
        norm_topk_prob: normalize a token's weights to sum 1: they are a softmax over its k experts.
        bias: True if the logits have one.
    """

    def __init__(
        self,
        num_experts: int,
        num_experts_per_tok: int,
        std: float,
        norm_topk_prob: bool,
        bias: bool = False,
        hf_name: str | None = None,
    ) -> None:
        super().__init__(hf_name)
        self.num_experts_per_tok, self.norm_topk_prob = num_experts_per_tok, norm_topk_prob
        self.has_bias = bias
        self.weight = parameter(num_experts, self.config.model.hidden_size, std=std)
        if bias:
            self.bias = parameter(num_experts, std=std)

    def build(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routes tokens: (tokens, hidden) -> top-k weights, top-k experts, all probabilities.

        Shapes: float32 (tokens, k); int32 (tokens, k); float32 (tokens, num_experts).
        """
        logits = cast_if_needed(ops.matmul(x, self.weight.transpose((1, 0))), popxl.float32)
        if self.has_bias:
            logits = logits + cast_if_needed(self.bias, popxl.float32)
        probabilities = ops.softmax(logits, -1)
        scores = logits if self.norm_topk_prob else probabilities
        weights, experts = ops.topk(scores, self.num_experts_per_tok, -1, True, True)
        if self.norm_topk_prob:  # without the rounding of a division: the weight of one expert is 1
            weights = ops.softmax(weights, -1)
        return weights, experts, probabilities


@dataclass(frozen=True)
class ExpertWeightNames:
    """Names of a mixture-of-experts layer's expert weights in Hugging Face files.

    Attributes:
        gate, up, down: an expert's projections.
        interleaved: True if stacked tensors have rows of gate and up in turn and matrices as (in
            features, out features), and exports have stacked tensors too, as gpt-oss.
        stacked_in: name of the module with stacked tensors, if it is not this one's.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    interleaved: bool = False
    stacked_in: str | None = None


class ExpertLinear(Module):
    """Linear layers of all experts, with weights and biases stacked along the first axis.

    In files they are modules beside this one.

    Args:
        names: of all experts' linear layers in Hugging Face's model.
        shape: of a weight, (out features, in features).
        std: of the initial weights.
        has_bias: True if they have biases.
        is_down: True for down projections, False for gate and up projections.
    """

    def __init__(
        self,
        names: Sequence[str],
        shape: tuple[int, int],
        std: float,
        has_bias: bool,
        is_down: bool,
    ) -> None:
        super().__init__(hf_name="")
        expert_parallel, count = self.config.execution.expert_parallel, len(names) // (2 - is_down)
        weights = [Weight(f"{name}.weight", shape, std) for name in names]
        self.weight = fused_parameter(
            weights, 0, transposed=is_down, expert_matrices=count, expert_parallel=expert_parallel
        )
        if has_bias:
            biases = [Weight(f"{name}.bias", shape[:1], 0.0) for name in names]
            sharding = {"is_sharded": False} if is_down else {"expert_parallel": expert_parallel}
            self.bias = fused_parameter(biases, 0, **sharding)

    def is_quantizable(self, mapping: WeightMapping) -> bool:
        return mapping.expert_matrices > 0


class Experts(Module):
    """The experts of a mixture-of-experts layer, which may have adapters.

    Tensor parallelism shards the features of each expert, or the experts
    (`execution.expert_parallel`).

    Args:
        num_experts: of the layer.
        intermediate_size: features between an expert's up and down projections.
        gated_activation: see there.
        std: of the initial weights.
        bias: True if the projections have biases.
        num_experts_in_group: number of experts of this module; None: all.

    Attributes:
        num_local_experts: on this replica.
        local_size: features of each expert on this replica.
    """

    gate_up_adapter: ExpertAdapter | None = None
    down_adapter: ExpertAdapter | None = None

    def __init__(
        self,
        num_experts: int,
        intermediate_size: int,
        gated_activation: GatedActivation,
        std: float,
        bias: bool = False,
        names: ExpertWeightNames = ExpertWeightNames(),
        num_experts_in_group: int | None = None,
    ) -> None:
        super().__init__()
        execution, hidden = self.config.execution, self.config.model.hidden_size
        tensor_parallel, group_size = execution.tensor_parallel, num_experts_in_group or num_experts
        self.gated_activation, self.has_bias, self.names = gated_activation, bias, names
        self.num_experts, self.num_experts_in_group = num_experts, group_size
        self.is_expert_parallel = (
            execution.expert_parallel and tensor_parallel > 1 and num_experts_in_group is None
        )
        if self.is_expert_parallel:
            self.num_local_experts = group_size // tensor_parallel
            self.local_size = intermediate_size
        else:
            self.num_local_experts = group_size
            self.local_size = intermediate_size // tensor_parallel
        gate_up = [name for names in self._gate_up_names(group_size) for name in names]
        self.gate_up = ExpertLinear(gate_up, (intermediate_size, hidden), std, bias, is_down=False)
        down = [name for names in self._down_names(group_size) for name in names]
        self.down = ExpertLinear(down, (hidden, intermediate_size), std, bias, is_down=True)

    # ---- names ----------------------------------------------------------------------------------
    def _gate_up_names(self, count: int) -> list[tuple[str, str]]:
        return [(f"{e}.{self.names.gate}", f"{e}.{self.names.up}") for e in range(count)]

    def _down_names(self, count: int) -> list[tuple[str]]:
        return [(f"{e}.{self.names.down}",) for e in range(count)]

    def file_names(self, hf_path: str) -> HfTensorNames:
        """Returns names of the stacked expert weights in older or newer Hugging Face files."""
        names, parent = self.names, hf_path.rpartition(".")[0]
        if names.stacked_in is not None:
            parent = f"{parent.rpartition('.')[0]}.{names.stacked_in}"
        projections: dict[str, Callable[[int], Sequence[tuple[str, ...]]]] = {
            "gate_up_proj": self._gate_up_names,
            "down_proj": self._down_names,
        }
        fused: dict[str, FusedWeights] = {}
        for field in ("weight", "bias")[: 1 + self.has_bias]:
            suffix = "_bias" if field == "bias" else ""
            for projection, names_of in projections.items():
                groups = tuple(
                    tuple(f"{hf_path}.{name}.{field}" for name in group)
                    for group in names_of(self.num_experts)
                )
                fused[f"{parent}.experts.{projection}{suffix}"] = FusedWeights(
                    groups,
                    stack_axis=0,
                    interleaved=names.interleaved and projection == "gate_up_proj",
                    transposed=names.interleaved and field == "weight",
                    in_exports=names.interleaved,
                )
        return HfTensorNames(fused=fused)

    # ---- arithmetic -----------------------------------------------------------------------------
    def build(
        self,
        tokens: Tensor,
        topk_weights: Tensor,
        topk_experts: Tensor,
        sorted_rows: tuple[Tensor, ...],
    ) -> Tensor:
        """Computes sum_e weight_e * down_e(gated_activation(gate_e x, up_e x)).

        Shapes: (tokens, hidden) -> the same shape.

        Args:
            topk_weights: float32 (tokens, k).
            topk_experts: int32 (tokens, k), numbered within this module; other numbers are left
                out.
            sorted_rows: see `sort_by_expert`.
        """
        x, weights = (self.groups.copy_to_tp(t) for t in (tokens, topk_weights))
        y = self.groups.reduce_from_tp(self._partial_sum(x, weights, sorted_rows))
        if self.has_bias:
            y = y + self._weighted_biases(topk_weights, topk_experts, tokens)
        return y

    def sort_rows(self, topk_experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sorts rows by expert, those of this replica's experts first; see `sort_by_expert`."""
        order, inverse_order, group_sizes = sort_by_expert(
            self._rotate_to_local(topk_experts), experts=self.num_experts
        )
        if self.is_expert_parallel:
            group_sizes = group_sizes[: self.num_local_experts]
        return order, inverse_order, group_sizes

    def _rotate_to_local(self, topk_experts: Tensor) -> Tensor:
        """Renumbers experts modulo their number so that this replica's first expert is number 0."""
        if not self.is_expert_parallel:
            return topk_experts
        count = popxl.constant(self.num_experts, popxl.int32, "experts")
        first = self.groups.tp_rank() * self.num_local_experts
        return ops.fmod(topk_experts + (count - first), count)

    def _partial_sum(
        self, x: Tensor, topk_weights: Tensor, sorted_rows: tuple[Tensor, ...]
    ) -> Tensor:
        """Computes this replica's term, (tokens, hidden), of the experts' sum over replicas.

        A replica has a shard of each expert's features or some of the experts; rows of experts on
        other replicas are zeros.

        The input of the down projection is scaled by the weights, not its output: it is smaller,
        and the gradient then repeats no matmul.
        """
        order, inverse_order, group_sizes = sorted_rows
        rows, expected = order / topk_weights.shape[1], self._expected_num_rows(topk_weights)
        gate_up = ops.grouped_matmul(
            x, self.gate_up.weight, group_sizes, transpose=True, expected_rows=expected, rows=rows
        )
        if self.gate_up_adapter is not None:
            gate_up = self.gate_up_adapter(x, gate_up, group_sizes, expected, rows)
        if self.has_bias:
            bias = self.gate_up.bias.reshape((self.num_local_experts, 2 * self.local_size))
            gate_up = gate_up + repeat_by_group(bias, group_sizes, rows=rows.shape[0])
        gate, up = ops.split(gate_up, 2, axis=-1)
        hidden = scale_rows(self.gated_activation(gate, up), topk_weights, order, inverse_order)
        tokens = x.shape[0]
        y = ops.grouped_matmul(
            hidden,
            self.down.weight,
            group_sizes,
            expected_rows=expected,
            rows=rows,
            num_out_rows=tokens,
        )
        if self.down_adapter is None:
            return y
        return self.down_adapter(hidden, y, group_sizes, expected, rows)

    def _expected_num_rows(self, topk_weights: Tensor) -> int | None:
        """Returns the rows that local experts get if routing is balanced; None: all rows."""
        local, total = self.num_local_experts, self.num_experts
        return None if local == total else topk_weights.nelms * local // total

    def _weighted_biases(self, topk_weights: Tensor, topk_experts: Tensor, x: Tensor) -> Tensor:
        """Sums the down projections' biases by the router's weights: (tokens, hidden)."""
        count = self.num_experts_in_group
        weights = scatter_router_weights(topk_weights, topk_experts, experts=count)
        return ops.matmul(cast_if_needed(weights, x.dtype), self.down.bias.reshape((count, -1)))


class MoE(Module):
    """A mixture-of-experts layer, a router and its experts; takes the place of the MLP.

    Args:
        router: named `gate`, as in most of Hugging Face's models.
        shared: a feed-forward layer that all tokens use, `build(x, ctx)`; its output is multiplied
            by sigmoid(x @ shared_expert_gate), whose initial weights have `std`. None: none.
        router_alias: another name of the router's weight, relative to the layer.
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
        """Returns the name under which newer Hugging Face files store the router's weight."""
        if self._router_alias is None:
            return HfTensorNames()
        name = f"{hf_path}.{self.gate.hf_name or 'gate'}.weight"
        return HfTensorNames(aliases={f"{hf_path.rpartition('.')[0]}.{self._router_alias}": name})

    def build(self, x: Tensor, ctx: BlockContext) -> Tensor | None:
        """Runs router and experts: (..., hidden) -> same shape; None if the experts run later.

        See `BlockContext.defer_experts`.
        """
        tokens = x.reshape((-1, x.shape[-1]))
        topk_weights, topk_experts, probabilities = self.gate(tokens)
        if ctx.routes_only:
            y = None
            ctx.defer_experts(normed=x, topk_weights=topk_weights, topk_experts=topk_experts)
        else:
            sorted_rows = self.experts.sort_rows(topk_experts)
            y = self.experts(tokens, topk_weights, topk_experts, sorted_rows)
        if self.has_shared:
            shared = self.shared_expert_gate(tokens) * self.shared_expert(tokens, ctx)
            y = shared if y is None else y + shared
        ctx.count_experts(topk_experts, probabilities)
        return None if y is None else y.reshape(x.shape)

    def expert_input_specs(self, x: TensorSpec) -> Mapping[str, TensorSpec]:
        """Returns the specs of the tensors that `BlockContext.defer_experts` receives for x."""
        tokens_and_k = (math.prod(x.shape[:-1]), self.gate.num_experts_per_tok)
        return {
            "normed": x,
            "topk_weights": TensorSpec(tokens_and_k, popxl.float32),
            "topk_experts": TensorSpec(tokens_and_k, popxl.int32),
        }


class SharedExpertGate(Module):
    """Gate of the shared expert: sigmoid(x @ weight).

    Args:
        std: of the initial weights.
    """

    def __init__(self, std: float) -> None:
        super().__init__()
        self.weight = parameter(1, self.config.model.hidden_size, std=std)

    def build(self, x: Tensor) -> Tensor:
        """Computes the gate of the shared expert: (tokens, hidden) -> (tokens, 1)."""
        half_logits = ops.matmul(x, self.weight.transpose((1, 0))) * 0.5
        return (ops.tanh(half_logits) + 1.0) * 0.5  # the sigmoid


class _ExpertGroupMLP(Module):
    """A module whose submodule `mlp` has one group's experts, as a block's has all experts."""

    def __init__(self, experts: Experts, hf_name: str | None) -> None:
        super().__init__(hf_name)
        self.experts = experts


class ExpertGroup(Module):
    """One of `execution.expert_groups` equal groups of experts, which trains as its own phase.

    Args:
        experts: the group's.
        hf_name: of the layer's `mlp`.
    """

    def __init__(self, experts: Experts, hf_name: str | None = None) -> None:
        super().__init__()
        self.mlp = _ExpertGroupMLP(experts, hf_name)

    def build(
        self,
        normed: Tensor,
        topk_weights: Tensor,
        topk_experts: Tensor,
        group_index: Tensor,
        seed: Tensor | None = None,
    ) -> Tensor:
        """Computes the output of this group's experts: (..., hidden) -> the same shape.

        Args:
            normed, topk_weights, topk_experts: see `MoE.build`.
            group_index: int32 scalar.
        """
        experts = self.mlp.experts
        count = experts.num_experts_in_group
        local_experts = topk_experts - group_index * count
        sorted_rows = sort_local_experts(local_experts, experts=count)
        tokens = normed.reshape((-1, normed.shape[-1]))
        return experts(tokens, topk_weights, local_experts, sorted_rows).reshape(normed.shape)
