"""AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from config.optimizer_state.slots import FIRST, SECOND, OptimizerRecord, Slot

if TYPE_CHECKING:
    from config.run import Optimizer
    from popxl_addons import Module
    from popxl_addons.optimizers.adafactor import Whole


def _keeps(optimizer: Optimizer, rank: int) -> tuple[Slot, ...]:
    return ADAMW.slots


def _step(optimizer: Optimizer, whole: Callable[[], Whole]) -> tuple[type[Module], dict[str, Any]]:
    import popxl
    from popxl_addons.optimizers.adam import AdamOptimizerStep

    return AdamOptimizerStep, {
        "beta1": optimizer.beta1,
        "beta2": optimizer.beta2,
        "eps": optimizer.eps,
        "first_order_dtype": popxl.dtype.from_name(FIRST.dtype),
    }


ADAMW = OptimizerRecord((FIRST, SECOND), _keeps, _step)
