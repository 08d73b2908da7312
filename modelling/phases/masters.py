"""Float32 masters of 16-bit weights (Micikevicius et al., arXiv:1710.03740).

The optimizer updates the master; the weight that the model computes with is the master, rounded to
nearest. So updates that are smaller than the distance of two 16-bit values add up.
"""

from __future__ import annotations

from typing import Any

import popxl
from config.run import MASTER
from popxl import ReplicaGrouping, ops
from popxl_addons.optimizers.adafactor import AdafactorOptimizerStep
from popxl_addons.optimizers.adam import AdamOptimizerStep


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
        master = self.state_like(MASTER, var, popxl.float32, group)  # type: ignore[attr-defined]
        super().build(master, grad, group, **settings)  # type: ignore[misc]
        ops.var_updates.copy_var_update_(var, ops.cast(master, var.dtype))


class AdamOnMaster(_OnMaster, AdamOptimizerStep):
    """AdamW with a master."""


class AdafactorOnMaster(_OnMaster, AdafactorOptimizerStep):
    """Adafactor with a master."""
