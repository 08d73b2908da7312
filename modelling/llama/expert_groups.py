"""Blocks whose experts are phases of their own in training, and groups of these experts."""

from __future__ import annotations

import math
from collections.abc import Mapping

import popxl
from config.llama import LlamaConfig
from modelling.layers import Experts, Groups, Layer, RMSNorm, add_residual
from modelling.llama.block import Block, CountingBlock, experts_of
from popxl import Tensor, TensorSpec
from popxl_addons.ops.routing import rows_of_experts


class RoutingBlock(Block):
    """A block that ends with its router, and the expert that all tokens use.

    Generation calls `around`, which is the whole block.
    """

    feed_forward: Experts
    feed_forward_norm: RMSNorm

    def build(  # type: ignore[override]
        self, x: Tensor, starts: Tensor | None = None, seed: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """x: (batch, length, hidden) -> x with attention, what groups of experts add to, and what
        they read, see `handed_on`."""
        attend, seeds = self.attending(starts, seed)
        x = self.attended(x, attend, seeds)
        normed = self.feed_forward_norm(x)
        tokens = normed.reshape((-1, x.shape[-1]))
        weights, chosen, _ = self.feed_forward.route(tokens)
        if self.feed_forward.shared is not None:
            x = add_residual(x, self.feed_forward.of_shared(tokens).reshape(x.shape))
        return x, normed, weights, chosen

    def handed_on(self, x: TensorSpec) -> Mapping[str, TensorSpec]:
        """What groups read: the normed input, and weights and choices of the router."""
        choices = (math.prod(x.shape[:-1]), self.model.experts.chosen)
        return {
            "normed": x,
            "weights": TensorSpec(choices, popxl.float32),
            "chosen": TensorSpec(choices, popxl.int32),
        }


class CountingRoutingBlock(RoutingBlock, CountingBlock):
    """One that adds up how its experts are used, see `CountingBlock`."""

    def build(  # type: ignore[override]
        self,
        x: Tensor,
        usage: Tensor,
        segments: Tensor,
        starts: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """x and the usage before the layer -> those after it, and what groups read."""
        x, *handed_on = RoutingBlock.build(self, x, starts, seed)
        return x, self.counted(usage, segments), *handed_on


class ExpertGroup(Layer):
    """Neighbouring experts of a layer, `execution.expert_groups` of which are all.

    Variables: of `feed_forward`, see `Experts`, those of experts.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        groups, model = Groups.current(config.execution.tensor_parallel), config.model
        held = model.experts.count // config.execution.expert_groups
        self.feed_forward = experts_of(model, groups, held=held)

    def build(
        self,
        normed: Tensor,
        weights: Tensor,
        chosen: Tensor,
        number: Tensor,
        seed: Tensor | None = None,
    ) -> Tensor:
        """What these experts add to x, of its shape.

        Args:
            normed, weights, chosen: see `RoutingBlock.handed_on`.
            number: of the group, int32 scalar.
        """
        held = self.feed_forward.held
        own = chosen - number * held
        routes = rows_of_experts(own, experts=held)
        tokens = normed.reshape((-1, normed.shape[-1]))
        return self.feed_forward.mixture(tokens, weights, own, routes).reshape(normed.shape)
