"""Float32 masters of 16-bit weights (Micikevicius et al., arXiv:1710.03740).

The optimizer updates the master; the weight that the model computes with is the master, rounded to
nearest. So updates that are smaller than the distance of two 16-bit values add up.
"""

from __future__ import annotations

from typing import Any

import popxl
import popxl_addons as addons
from config.optimizer_state import MASTER
from popxl import ReplicaGrouping, ops


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


def on_master(step: type[addons.Module]) -> type[addons.Module]:
    """The module of an optimizer's step that updates a master."""
    return type(f"{step.__name__}OnMaster", (_OnMaster, step), {})
