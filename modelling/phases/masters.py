"""What an optimizer updates in place of a 16-bit weight: a float32 master (Micikevicius et al.,
arXiv:1710.03740), or the weight joined with a residual (FlashOptim, arXiv:2602.23349).

The weight that the model computes with is that, rounded to nearest. So updates that are smaller
than the distance of two 16-bit values add up.
"""

from __future__ import annotations

from typing import Any

import popxl
import popxl_addons as addons
from config.optimizer_state import MASTER, Slot
from popxl import ReplicaGrouping, ops
from popxl_addons.optimizers.residual import joined, keep_split


class _OnMaster:
    """Makes an optimizer step update the master. A mixin: list it before the step among the bases.
    The master is optimizer state named `MASTER`: float32, with the shape and sharding of the
    variable.
    """

    def build(
        self,
        var: popxl.TensorByRef,
        grad: popxl.Tensor,
        replica_grouping: ReplicaGrouping | None = None,
        **settings: Any,
    ) -> None:
        """Update the master, the other state, and `var`; see the optimizer's own `build`."""
        group = replica_grouping
        master = self.state_like(MASTER.name, var, popxl.float32, group)  # type: ignore[attr-defined]
        super().build(master, grad, group, **settings)  # type: ignore[misc]
        ops.var_updates.copy_var_update_(var, ops.cast(master, var.dtype))


class _OnResidual:
    """Makes an optimizer step update the weight joined with its residual, as `_OnMaster` does."""

    slot: Slot

    def build(
        self,
        var: popxl.TensorByRef,
        grad: popxl.Tensor,
        replica_grouping: ReplicaGrouping | None = None,
        **settings: Any,
    ) -> None:
        """Update the residual, the other state, and `var`; see the optimizer's own `build`."""
        dtype = popxl.dtype.from_name(self.slot.dtype)
        residual = self.state_like(self.slot.name, var, dtype, replica_grouping)  # type: ignore[attr-defined]
        weight = joined(var, residual)
        super().build(weight, grad, replica_grouping, **settings)  # type: ignore[misc]
        keep_split(var, residual, weight)


def keeping(step: type[addons.Module], slot: Slot) -> type[addons.Module]:
    """The module of an optimizer's step that updates what `slot` keeps of a weight."""
    name = f"{step.__name__}On{slot.name.title()}"
    if slot == MASTER:
        return type(name, (_OnMaster, step), {})
    return type(name, (_OnResidual, step), {"slot": slot})
