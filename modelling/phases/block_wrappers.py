"""Wrappers that run decoder blocks over whole samples, in training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping

from modelling.layers import BlockContext, Module, MoE, seed_adapters
from modelling.layers.layer_wrapper import LayerWrapper
from modelling.layers.module import iter_modules
from popxl import Tensor, TensorSpec


class TrainingBlock(LayerWrapper):
    """Wraps a decoder block for whole samples, without a KV cache."""

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
        """x: (batch, length, hidden) -> the same shape, then the updated sum of expert usage.

        Args:
            usage, segment_ids, segment_starts, seed: fields of `BlockContext`.
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
    """Wraps a mixture-of-experts block so that it stops after the router, for streamed experts."""

    routes_only = True

    def expert_input_specs(self, x: TensorSpec) -> Mapping[str, TensorSpec]:
        """Specs of the streamed experts' inputs by name, for the spec of x."""
        (moe,) = (part for part in iter_modules(self.layer) if isinstance(part, MoE))
        return moe.expert_input_specs(x)
