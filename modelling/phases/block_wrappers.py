"""Blocks that run over whole samples, in training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping

from modelling.layers import Context, Module, MoE, seed_adapters
from modelling.layers.module import parts_of
from modelling.layers.wrapped import Wrapped
from popxl import Tensor, TensorSpec


class TrainingBlock(Wrapped):
    """A block of a decoder alone."""

    layer: Module
    routes_only = False

    def build(
        self,
        x: Tensor,
        usage: Tensor | None = None,
        segment_ids: Tensor | None = None,
        segment_starts: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """x: (batch, length, hidden) -> the same shape, and the usage of experts with the block's.

        Args:
            usage, segments, starts, seed: see `Context`.
        """
        seed_adapters(self.layer, seed)
        ctx = Context(segment_starts, seed, usage, segment_ids, self.routes_only)
        y = self.layer(x, ctx)
        return y, *([] if ctx.usage is None else [ctx.usage]), *ctx.expert_inputs.values()


class RouterOnlyBlock(TrainingBlock):
    """A block that ends with its router: it hands on what groups of experts read."""

    routes_only = True

    def expert_inputs(self, x: TensorSpec) -> Mapping[str, TensorSpec]:
        """Specs of that, for an x, by name."""
        (moe,) = (part for part in parts_of(self.layer) if isinstance(part, MoE))
        return moe.expert_inputs(x)
