"""What an optimizer updates in place of a 16-bit weight: a float32 master (Micikevicius et al.,
arXiv:1710.03740), or the weight joined with a residual (FlashOptim, arXiv:2602.23349).

The weight that the model computes with is that, rounded to nearest. So updates that are smaller
than the distance of two 16-bit values add up.
"""

from __future__ import annotations

from typing import Any

import popxl
import popxl_addons as addons
from config.optimizer_state import MASTER_WEIGHT, StateSlot
from popxl import ReplicaGrouping, ops
from popxl_addons.optimizers.weight_residual import join_weight, store_split_weight


class _WithMasterWeight:
    """Makes an optimizer step update the whole weight: its master, or the weight joined with its
    residual. A mixin: list it before the step among the bases. `slot` is what is kept of the weight
    besides its 16 bits; it is optimizer state with the shape and sharding of the variable.
    """

    slot: StateSlot

    def build(
        self,
        var: popxl.TensorByRef,
        grad: popxl.Tensor,
        replica_grouping: ReplicaGrouping | None = None,
        **settings: Any,
    ) -> None:
        """Update what is kept, the other state, and `var`; see the optimizer's own `build`."""
        dtype = popxl.dtype.from_name(self.slot.dtype)
        kept = self.add_state_like(self.slot.name, var, dtype, replica_grouping)  # type: ignore[attr-defined]
        whole = kept if self.slot == MASTER_WEIGHT else join_weight(var, kept)
        super().build(whole, grad, replica_grouping, **settings)  # type: ignore[misc]
        if self.slot == MASTER_WEIGHT:
            ops.var_updates.copy_var_update_(var, ops.cast(kept, var.dtype))
        else:
            store_split_weight(var, kept, whole)


def with_master_weight(step: type[addons.Module], slot: StateSlot) -> type[addons.Module]:
    """The module of an optimizer's step that updates what `slot` keeps of a weight."""
    return type(f"{step.__name__}On{slot.name.title()}", (_WithMasterWeight, step), {"slot": slot})
