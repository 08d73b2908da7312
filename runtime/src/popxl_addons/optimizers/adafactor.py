"""Adafactor: second moments of matrices are factored into row and column means."""

from __future__ import annotations

import popxl
from popxl import ReplicaGrouping, ops
from popxl_addons.layers.initialisers import zeros
from popxl_addons.optimizers._optimizer_step import (
    Number,
    OptimizerStep,
    as_tensor,
    is_not_neutral,
    to_float32,
)
from popxl_addons.optimizers._sharded_matrices import MatrixLayout, ShardedMatrices

__all__ = ["AdafactorOptimizerStep", "MatrixLayout"]


class AdafactorOptimizerStep(OptimizerStep):
    """One in-place Adafactor step of a variable (Shazeer and Stern, arXiv:1804.04235).

    It computes the same as `transformers.optimization.Adafactor`. Variables, all float32: `step`, a
    scalar; for a matrix (n, m) `second_order_rows` (n,), or (count * n,) for several matrices one
    after the other, and `second_order_columns` (m,), the row and column means of the moving average
    of squared gradients; otherwise `second_order`, of the variable's shape; with `beta1` also
    `first_order`, of the variable's shape. State of the variable's shape is sharded like it.

    Args:
        cache: reuse the graph for variables of the same shape and the same settings.
    """

    def build(
        self,
        var: popxl.TensorByRef,
        grad: popxl.Tensor,
        replica_grouping: ReplicaGrouping | None = None,
        *,
        lr: Number | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: Number | None = None,
        weight_decay: Number = 0.0,
        scale_parameter: bool = True,
        relative_step: bool | None = None,
        warmup_init: bool = False,
        loss_scaling: Number = 1,
        global_norm: popxl.Tensor | None = None,
        global_norm_max: Number | None = None,
        matrix_layout: MatrixLayout | None = None,
        apply_update: popxl.Tensor | None = None,
    ) -> None:
        """Run an Adafactor step: update `var` and the optimizer state in place.

        Args:
            var: the variable, or a replica's shard of it.
            grad: its gradient, of the same shape and any floating-point dtype.
            replica_grouping: replicas that share the value of the variable.
            lr: learning rate. None: computed from the step (see `relative_step`).
            eps: added to squared gradients; minimum root mean square of the variable in
                `scale_parameter`.
            clip_threshold: maximum root mean square of an update, before the learning rate.
            decay_rate: the second moments decay by 1 - step**decay_rate.
            beta1: decay of the moving average of updates. None: no moving average.
            weight_decay: decoupled weight decay, times the learning rate.
            scale_parameter: True multiplies the learning rate by the variable's root mean square.
            relative_step: True if the learning rate is 1 / sqrt(step), at most 0.01. Default: True
                without `lr`.
            warmup_init: True bounds the learning rate by 1e-6 * step.
            loss_scaling: factor on the loss, by which the gradient is divided.
            global_norm: norm of all gradients, without loss scaling.
            global_norm_max: gradients are scaled down so that the norm is at most this.
            matrix_layout: layout of the matrices in the variable. Default: it is one matrix.
            apply_update: bool scalar; where it is False the step changes nothing.

        Raises:
            ValueError: shapes differ, only one of the norms is given, both or none of a learning
                rate and `relative_step`, or `warmup_init` without `relative_step`.
        """
        _check_learning_rate(lr, relative_step, warmup_init)
        self.apply_update = apply_update
        group = popxl.gcg().ir.replica_grouping() if replica_grouping is None else replica_grouping
        gradient = self.unscale_and_clip(var, grad, loss_scaling, global_norm, global_norm_max)
        matrices = ShardedMatrices(var, group, matrix_layout or MatrixLayout())
        step = self.increment_step()
        base_lr = _relative_step(step, warmup_init) if lr is None else as_tensor(lr)
        decay = 1 - ops.pow(step, as_tensor(decay_rate))

        direction = self._scaled_gradient(var, gradient, matrices, group, decay, eps[0])
        update_rms = ops.sqrt(matrices.matrix_means(direction * direction))
        one = popxl.constant(1.0, popxl.float32)
        lrs = base_lr / ops.maximum(update_rms / clip_threshold, one)
        decay_lrs = base_lr * one
        if scale_parameter:
            value = matrices.to_blocks(to_float32(var))
            weight_rms = ops.sqrt(matrices.matrix_means(value * value))
            scale = ops.maximum(weight_rms, as_tensor(eps[1]))
            lrs, decay_lrs = lrs * scale, base_lr * scale
        update = matrices.from_blocks(direction * _broadcast_per_matrix(lrs))
        if beta1 is not None:
            mean = self.add_state_like("first_order", var, popxl.float32, group)
            update = self._update_average(mean, update, beta1)
        if is_not_neutral(weight_decay, 0):
            decayed = matrices.to_blocks(to_float32(var)) * _broadcast_per_matrix(decay_lrs)
            update = update + matrices.from_blocks(decayed) * as_tensor(weight_decay)
        self.update_variable(var, lambda t: ops.var_updates.accumulate_(t, update, -1.0))

    def _update_average(
        self, average: popxl.Tensor, value: popxl.Tensor, decay: Number
    ) -> popxl.Tensor:
        """Update a moving average in place; returns it."""
        update = ops.var_updates.accumulate_moving_average_
        return self.update_variable(average, lambda t: update(t, value, decay))

    def _scaled_gradient(
        self,
        var: popxl.Tensor,
        gradient: popxl.Tensor,
        matrices: ShardedMatrices,
        group: ReplicaGrouping,
        decay: popxl.Tensor,
        eps: float,
    ) -> popxl.Tensor:
        """Scale the gradient by its second moment's inverse root: -> (height, count, columns)."""
        if not matrices.is_matrix:
            second = self.add_state_like("second_order", var, popxl.float32, group)
            square = self._update_average(second, gradient * gradient + eps, decay)
            return matrices.to_blocks(gradient / ops.sqrt(square))
        blocks = matrices.to_blocks(gradient)
        squares = blocks * blocks
        rows = self._add_factored_state("second_order_rows", 0, matrices)
        columns = self._add_factored_state("second_order_columns", 1, matrices)
        by_row = ops.transpose(matrices.row_means(squares))
        by_column = matrices.column_means(squares)
        row = self._update_average(rows, by_row.flatten() + eps, decay)
        column = self._update_average(columns, by_column.flatten() + eps, decay)
        row, column = ops.transpose(row.reshape(by_row.shape)), column.reshape(by_column.shape)
        relative = matrices.local_rows(row / matrices.combine_means(row, column))
        root = ops.sqrt(relative).reshape((matrices.height, matrices.count, 1))
        return blocks / root / ops.sqrt(column)

    def _add_factored_state(self, name: str, axis: int, matrices: ShardedMatrices) -> popxl.Tensor:
        """Add optimizer state with a value per row (axis 0) or column (axis 1) of each matrix."""
        elements = matrices.count * (matrices.columns if axis else matrices.rows)
        group = matrices.replicas_with_equal_means(axis)
        return self.add_variable_input(name, zeros((elements,)), popxl.float32, True, group)


def _check_learning_rate(lr: Number | None, relative_step: bool | None, warmup_init: bool) -> None:
    relative = lr is None if relative_step is None else relative_step
    if relative == (lr is not None) or (warmup_init and not relative):
        raise ValueError(
            "Adafactor takes a learning rate lr, or relative_step=True without one; "
            "warmup_init needs relative_step"
        )


def _relative_step(step: popxl.Tensor, warmup: bool) -> popxl.Tensor:
    """Learning rate min(1 / sqrt(step), 0.01); with warm-up min(1 / sqrt(step), 1e-6 * step)."""
    min_inverse = 1e6 / step if warmup else popxl.constant(100.0, popxl.float32)
    return 1 / ops.maximum(min_inverse, ops.sqrt(step))


def _broadcast_per_matrix(values: popxl.Tensor) -> popxl.Tensor:
    """Reshape values per matrix (count,) or a scalar to broadcast with (height, count, columns)."""
    return values.reshape((1, -1 if values.rank else 1, 1))
