"""Wrappers with which decoder blocks run on full samples, to train or evaluate."""

from __future__ import annotations

from collections.abc import Mapping

from modelling.layers import BlockContext, Module, MoE, seed_adapters
from modelling.layers.layer_wrapper import LayerWrapper
from modelling.layers.module import iter_modules
from popxl import Tensor, TensorSpec


class TrainingBlock(LayerWrapper):
    """Wraps a decoder block so that it runs on full samples, without a KV cache."""

    layer: Module
    routes_only = False

    def build(
        self,
        x: Tensor,
        expert_usage: Tensor | None = None,
        segment_ids: Tensor | None = None,
        segment_starts: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Runs the block: (batch, length, hidden) -> same shape; then the sum of expert usage.

        Args:
            expert_usage, segment_ids, segment_starts, seed: fields of `BlockContext`.
        """
        seed_adapters(self.layer, seed)
        ctx = BlockContext(segment_starts, seed, expert_usage, segment_ids, self.routes_only)
        y = self.layer(x, ctx)
        return (
            y,
            *([] if ctx.expert_usage is None else [ctx.expert_usage]),
            *ctx.expert_inputs.values(),
        )


class RouterOnlyBlock(TrainingBlock):
    """Wraps a mixture-of-experts block so that it ends at the router; its experts are streamed."""

    routes_only = True

    def expert_input_specs(self, x: TensorSpec) -> Mapping[str, TensorSpec]:
        """Specs, by name, of the tensors that the block passes to its streamed experts."""
        (moe,) = (part for part in iter_modules(self.layer) if isinstance(part, MoE))
        return moe.expert_input_specs(x)
