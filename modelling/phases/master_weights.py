"""Master weights: optimizers update a higher-precision copy of each 16-bit weight.

It is a float32 copy (Micikevicius et al., arXiv:1710.03740), or the weight joined with its rounding
residual (FlashOptim, arXiv:2602.23349). The model computes with that value rounded to nearest, so
updates smaller than the distance between two 16-bit values add up.
"""

from __future__ import annotations

from typing import Any

import popxl
import popxl_addons as addons
from config.optimizer_state import MASTER_WEIGHT, StateSlot
from popxl import ReplicaGrouping, ops
from popxl_addons.optimizers.weight_residual import join_weight, split_weight


class _WithMasterWeight:
    """Mixin: the optimizer step updates a higher-precision master weight, then rounds it to `var`.

    Attributes:
        slot: the optimizer state next to the 16-bit weight: the float32 master, or the residual;
            it has the shape and the sharding of the variable.
    """

    slot: StateSlot

    def build(
        self,
        var: popxl.TensorByRef,
        grad: popxl.Tensor,
        replica_grouping: ReplicaGrouping | None = None,
        **settings: Any,
    ) -> None:
        """Update master weight, optimizer state and `var`; arguments as for the optimizer."""
        dtype = popxl.dtype.from_name(self.slot.dtype)
        state = self.add_state_like(self.slot.name, var, dtype, replica_grouping)  # type: ignore[attr-defined]
        master = state if self.slot == MASTER_WEIGHT else join_weight(var, state)
        super().build(master, grad, replica_grouping, **settings)  # type: ignore[misc]
        if self.slot == MASTER_WEIGHT:
            self.store(var, ops.cast(state, var.dtype))  # type: ignore[attr-defined]
        else:
            low, residual = split_weight(master, var, state)
            self.store(var, low)  # type: ignore[attr-defined]
            self.store(state, residual)  # type: ignore[attr-defined]


def with_master_weight(step: type[addons.Module], slot: StateSlot) -> type[addons.Module]:
    """Returns an optimizer step that has a master weight in the state slot `slot`."""
    return type(f"{step.__name__}On{slot.name.title()}", (_WithMasterWeight, step), {"slot": slot})
