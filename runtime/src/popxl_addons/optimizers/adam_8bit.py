"""AdamW with 8-bit moments."""

from __future__ import annotations

from typing import Any

import popxl
from popxl import ReplicaGrouping
from popxl.custom import jax_op
from popxl_addons.optimizers import state_8bit
from popxl_addons.optimizers._optimizer_step import Number, to_float32
from popxl_addons.optimizers.adam import AdamOptimizerStep
from popxl_addons.sharding import num_shards_of_spec

__all__ = ["Adam8bitOptimizerStep"]

_NO_GRAD = "optimizer state is not differentiated"
_quantize_first_moment = jax_op(name="quantize_first_moment", no_grad=_NO_GRAD)(
    lambda moment, *, blocks: state_8bit.quantize_first_moment(moment, blocks)
)
_dequantize_first_moment = jax_op(name="dequantize_first_moment", no_grad=_NO_GRAD)(
    lambda codes, scales, *, blocks: state_8bit.dequantize_first_moment(codes, scales, blocks)
)
_quantize_second_moment = jax_op(name="quantize_second_moment", no_grad=_NO_GRAD)(
    lambda moment, *, blocks: state_8bit.quantize_second_moment(moment, blocks)
)
_dequantize_second_moment = jax_op(name="dequantize_second_moment", no_grad=_NO_GRAD)(
    lambda codes, scales, *, blocks: state_8bit.dequantize_second_moment(codes, scales, blocks)
)


class Adam8bitOptimizerStep(AdamOptimizerStep):
    """AdamW step with 8-bit moments (FlashOptim, arXiv:2602.23349); see `state_8bit`.

    Variables: `first_order_codes` (int8) and `second_order_codes` (uint8), of the variable's shape,
    `first_order_scales` and `second_order_scales` (bfloat16), one per block of 32 elements along
    `axis`, and `step`. Moments are dequantized, updated in float32 and quantized again.

    Args:
        cache: reuse the graph for variables of the same shape and the same settings.
    """

    def build(  # type: ignore[override]
        self,
        var: popxl.TensorByRef,
        grad: popxl.Tensor,
        replica_grouping: ReplicaGrouping | None = None,
        *,
        axis: int,
        **settings: Any,
    ) -> None:
        """Run an AdamW step with 8-bit moments; other arguments as for `AdamOptimizerStep.build`.

        Args:
            axis: axis of the full variable along which consecutive elements share a scale.

        Raises:
            ValueError: as for `AdamOptimizerStep.build`; or the variable has no such axis, or
                shards split a block.
        """
        shape = tuple(var.meta_shape or var.shape)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"Adam8bitOptimizerStep: {var.id!r} of shape {shape} has no axis {axis}"
            )
        self._axis = axis % len(shape)
        super().build(var, grad, replica_grouping, **settings)

    def _update_moments(
        self,
        var: popxl.Tensor,
        gradient: popxl.Tensor,
        group: ReplicaGrouping | None,
        beta1: Number,
        beta2: Number,
        dtypes: tuple[popxl.dtype, popxl.dtype],
    ) -> tuple[popxl.Tensor, popxl.Tensor]:
        blocks = self._quant_blocks(var, group)
        first = self._add_moment_state("first_order", popxl.int8, var, group)
        second = self._add_moment_state("second_order", popxl.uint8, var, group)
        old_mean = _dequantize_first_moment(*first, blocks=blocks)
        old_square = _dequantize_second_moment(*second, blocks=blocks)
        mean = _moving_average(old_mean, gradient, beta1)
        square = _moving_average(old_square, gradient * gradient, beta2)
        for state, new in (
            (first, _quantize_first_moment(mean, blocks=blocks)),
            (second, _quantize_second_moment(square, blocks=blocks)),
        ):
            for variable, value in zip(state, new, strict=True):
                self.store(variable, value.reshape(variable.shape))
        return mean, square

    def _quant_blocks(
        self, var: popxl.Tensor, group: ReplicaGrouping | None
    ) -> state_8bit.QuantBlocks:
        """Return the blocks (each with a scale) in which this replica's shard is quantized."""
        group = popxl.gcg().ir.replica_grouping() if group is None else group
        shape = tuple(var.meta_shape or var.shape)
        shards = num_shards_of_spec(var.spec, group.group_size)
        blocks = state_8bit.QuantBlocks.along_axis(self._axis, shape, shards)
        if blocks is None:
            raise ValueError(
                f"{shards} shards of {var.id!r}, {list(shape)}, split blocks of {state_8bit.BLOCK} "
                f"along axis {self._axis}: do not shard it"
            )
        return blocks

    def _add_moment_state(
        self, name: str, dtype: popxl.dtype, var: popxl.Tensor, group: ReplicaGrouping | None
    ) -> tuple[popxl.Tensor, popxl.Tensor]:
        """Add the state variables of an optimizer moment: its 8-bit codes and their scales."""
        scales = state_8bit.scales_shape(tuple(var.meta_shape or var.shape), self._axis)
        return (
            self.add_state_like(f"{name}_codes", var, dtype, group),
            self.add_state_like(f"{name}_scales", var, popxl.bfloat16, group, scales),
        )


def _moving_average(average: popxl.Tensor, value: popxl.Tensor, beta: Number) -> popxl.Tensor:
    """Update an exponential moving average by a new value."""
    decay = to_float32(beta) if isinstance(beta, popxl.Tensor) else beta
    return average * decay + value * (1 - decay)
