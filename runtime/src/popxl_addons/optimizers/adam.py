"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from typing import Any

import popxl
from popxl import ReplicaGrouping, ops
from popxl_addons.optimizers._optimizer_step import (
    Number,
    OptimizerStep,
    as_tensor,
    is_not_neutral,
    to_float32,
)

__all__ = ["AdamOptimizerStep"]


class AdamOptimizerStep(OptimizerStep):
    """One in-place AdamW step of a variable (Loshchilov and Hutter, 2019).

    Variables: `first_order` and `second_order`, of the given dtypes and the variable's shape,
    sharded like it; and with bias correction `step` (float32 scalar).

    Arithmetic is float32; each value is rounded once, when it is stored.

    Args:
        cache: reuse the graph for variables of the same shape and the same settings.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(
        self,
        var: popxl.TensorByRef,
        grad: popxl.Tensor,
        replica_grouping: ReplicaGrouping | None = None,
        *,
        lr: Number,
        beta1: Number = 0.9,
        beta2: Number = 0.999,
        eps: Number = 1e-5,
        weight_decay: Number = 0.01,
        first_order_dtype: popxl.dtype = popxl.float16,
        second_order_dtype: popxl.dtype = popxl.float32,
        bias_correction: bool = True,
        loss_scaling: Number = 1,
        global_norm: popxl.Tensor | None = None,
        global_norm_max: Number | None = None,
        apply_update: popxl.Tensor | None = None,
    ) -> None:
        """Run an AdamW step: update `var` and the optimizer state in place.

        Args:
            var: the variable, or a replica's shard of it.
            grad: its gradient, of the same shape and any floating-point dtype.
            replica_grouping: replicas that share the value of the variable.
            lr: learning rate. All numbers may be scalar tensors instead.
            eps: added to the root of the second moment, after bias correction.
            weight_decay: decoupled weight decay, times the learning rate.
            bias_correction: True divides the moments by 1 - beta**step.
            loss_scaling: factor on the loss, by which the gradient is divided.
            global_norm: norm of all gradients, without loss scaling.
            global_norm_max: gradients are scaled down so that the norm is at most this.
            apply_update: bool scalar; where it is False the step changes nothing.

        Raises:
            ValueError: shapes differ, or only one of the norms is given.
        """
        self.apply_update = apply_update
        gradient = self.unscale_and_clip(var, grad, loss_scaling, global_norm, global_norm_max)
        dtypes = first_order_dtype, second_order_dtype
        mean, square = self._update_moments(var, gradient, replica_grouping, beta1, beta2, dtypes)
        if bias_correction:
            step = self.increment_step()
            mean = mean / (1 - ops.pow(as_tensor(beta1), step))
            square = square / (1 - ops.pow(as_tensor(beta2), step))
        update = mean / (ops.sqrt(square) + as_tensor(eps))
        if is_not_neutral(weight_decay, 0):
            update = update + to_float32(var) * as_tensor(weight_decay)
        step_size = ops.negate(to_float32(lr)) if isinstance(lr, popxl.Tensor) else -lr
        self.update_variable(var, lambda t: ops.var_updates.accumulate_(t, update, step_size))

    def _update_moments(
        self,
        var: popxl.Tensor,
        gradient: popxl.Tensor,
        group: ReplicaGrouping | None,
        beta1: Number,
        beta2: Number,
        dtypes: tuple[popxl.dtype, popxl.dtype],
    ) -> tuple[popxl.Tensor, popxl.Tensor]:
        """Update first and second moments; returns them in float32."""
        updates = ops.var_updates
        first = self.add_state_like("first_order", var, dtypes[0], group)
        second = self.add_state_like("second_order", var, dtypes[1], group)
        mean = self.update_variable(
            first,
            lambda t: updates.accumulate_moving_average_(t, gradient, _as_scalar(beta1)),
        )
        square = self.update_variable(
            second,
            lambda t: updates.accumulate_moving_average_square_(t, gradient, _as_scalar(beta2)),
        )
        return to_float32(mean), to_float32(square)


def _as_scalar(x: Number) -> Number:
    return to_float32(x) if isinstance(x, popxl.Tensor) else float(x)
