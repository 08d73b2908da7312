"""AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from config.optimizer_state.slots import FIRST, SECOND, OptimizerRecord, Slot

if TYPE_CHECKING:
    from config.run import Optimizer
    from popxl_addons import Module
    from popxl_addons.optimizers.adafactor import Whole

HALF = tuple(replace(moment, dtype="bfloat16") for moment in (FIRST, SECOND))
PACKED = (
    Slot("first_order_codes", dtype="int8"),
    Slot("first_order_scales", "groups", "bfloat16"),
    Slot("second_order_codes", dtype="uint8"),
    Slot("second_order_scales", "groups", "bfloat16"),
)
"""The moments of a matrix in 8 bits; vectors are few, and keep float32."""


def _keeps(optimizer: Optimizer, rank: int) -> tuple[Slot, ...]:
    if optimizer.state == "bfloat16":
        return HALF
    return PACKED if _packs(optimizer, rank) else (FIRST, SECOND)


def _packs(optimizer: Optimizer, rank: int) -> bool:
    return optimizer.packs and rank == 2


def _step(
    optimizer: Optimizer, rank: int, whole: Callable[[], Whole]
) -> tuple[type[Module], dict[str, Any]]:
    import popxl
    from popxl_addons.optimizers import AdamOptimizerStep, PackedAdamOptimizerStep

    own = {"beta1": optimizer.beta1, "beta2": optimizer.beta2, "eps": optimizer.eps}
    if _packs(optimizer, rank):
        return PackedAdamOptimizerStep, {**own, "axis": whole().uncut_axis}
    first, second = (popxl.dtype.from_name(slot.dtype) for slot in _keeps(optimizer, rank))
    return AdamOptimizerStep, {**own, "first_order_dtype": first, "second_order_dtype": second}


ADAMW = OptimizerRecord((FIRST, SECOND, *PACKED), _keeps, _step)
