"""Base class of optimizer steps: loss scaling, gradient clipping, state variables."""

from __future__ import annotations

from collections.abc import Callable

import popxl
from popxl import ReplicaGrouping, ops
from popxl_addons.module import Module
from popxl_addons.sharding import num_shards_of_spec
from popxl_addons.utils import cast_if_needed
from popxl_addons.variable_factory import zeros

Number = float | popxl.Tensor


def to_float32(t: popxl.Tensor) -> popxl.Tensor:
    """Cast a tensor to float32."""
    return cast_if_needed(t, popxl.float32)


def as_tensor(x: Number) -> popxl.Tensor:
    """Convert a number or a scalar tensor to a float32 tensor."""
    return to_float32(x) if isinstance(x, popxl.Tensor) else popxl.constant(x, popxl.float32)


def is_not_neutral(x: Number, neutral_value: float) -> bool:
    """True if a factor may have an effect: any tensor, or a number other than `neutral_value`."""
    return isinstance(x, popxl.Tensor) or x != neutral_value


class OptimizerStep(Module):
    """Base class: one in-place optimizer step of one variable, computed in float32.

    Attributes:
        apply_update: bool scalar: where it is False the step changes no bit of its variables; None:
            it is always applied.

    Args:
        cache: reuse the graph for variables of the same shape and the same settings.
    """

    apply_update: popxl.Tensor | None = None

    def update_variable(
        self, var: popxl.Tensor, update: Callable[[popxl.Tensor], popxl.Tensor]
    ) -> popxl.Tensor:
        """Update a variable in place, if the step is applied; returns its value.

        A selection, unlike a branch, is fused into the update's loop over elements. The weight is
        computed from the selected moments: of others XLA's loop for the weight would compute the
        new moments again.

        Args:
            update: updates the variable in place, and returns the updated tensor.
        """
        if self.apply_update is None:
            return update(var)
        old = ops.identity(var)
        return ops.var_updates.copy_var_update_(var, ops.where(self.apply_update, update(var), old))

    def store(self, var: popxl.Tensor, value: popxl.Tensor) -> None:
        """Store a value in a variable in place, if the step is applied."""
        self.update_variable(var, lambda t: ops.var_updates.copy_var_update_(t, value))

    @staticmethod
    def unscale_and_clip(
        var: popxl.Tensor,
        grad: popxl.Tensor,
        loss_scaling: Number,
        global_norm: popxl.Tensor | None,
        global_norm_max: Number | None,
    ) -> popxl.Tensor:
        """Divide the gradient by the loss scaling, and clip it by the global norm; returns float32.

        Raises:
            ValueError: its shape is not the variable's, or only one of the norms is given.
        """
        if var.shape != grad.shape:
            raise ValueError(
                f"the gradient {grad.id!r} has shape {grad.shape}, its variable {var.shape}"
            )
        if (global_norm is None) != (global_norm_max is None):
            raise ValueError("gradient clipping needs both global_norm and global_norm_max")
        gradient = to_float32(grad)
        if is_not_neutral(loss_scaling, 1):
            gradient = gradient / as_tensor(loss_scaling)
        if global_norm is not None and global_norm_max is not None:
            limit = as_tensor(global_norm_max)
            gradient = gradient * (limit / ops.maximum(to_float32(global_norm), limit))
        return gradient

    def add_state_like(
        self,
        name: str,
        var: popxl.Tensor,
        dtype: popxl.dtype,
        group: ReplicaGrouping | None,
        shape: tuple[int, ...] | None = None,
    ) -> popxl.Tensor:
        """Add an optimizer state variable of zeros, sharded like `var`.

        Args:
            shape: full shape; default: that of `var`.
        """
        shape = tuple(var.meta_shape or var.shape) if shape is None else shape
        if not var.meta_shape:
            return self.add_variable_input(name, zeros(shape), dtype, True, group)
        group = popxl.gcg().ir.replica_grouping() if group is None else group
        shards = num_shards_of_spec(var.spec, group.group_size)
        return self.add_replica_sharded_variable_input(
            name, zeros(shape), dtype, True, group, shards
        )

    def increment_step(self) -> popxl.Tensor:
        """Increment the step counter; returns the new step number (from 1), float32 scalar."""
        counter = self.add_variable_input("step", zeros(()), popxl.float32, by_ref=True)
        one = popxl.constant(1, popxl.float32)
        return self.update_variable(counter, lambda t: ops.var_updates.accumulate_(t, one))
