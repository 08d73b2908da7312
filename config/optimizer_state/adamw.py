"""AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from config.optimizer_state.state_slots import FIRST_MOMENT, SECOND_MOMENT, OptimizerSpec, StateSlot

if TYPE_CHECKING:
    from config.training import Optimizer
    from popxl_addons import Module
    from popxl_addons.optimizers.adafactor import MatrixLayout

BF16_MOMENTS = tuple(replace(moment, dtype="bfloat16") for moment in (FIRST_MOMENT, SECOND_MOMENT))
QUANTIZED_MOMENTS = (
    StateSlot("first_order_codes", dtype="int8"),
    StateSlot("first_order_scales", "block", "bfloat16"),
    StateSlot("second_order_codes", dtype="uint8"),
    StateSlot("second_order_scales", "block", "bfloat16"),
)
"""8-bit moments of matrices; the moments of vectors, which are few, stay float32."""


def _state_slots(optimizer: Optimizer, rank: int) -> tuple[StateSlot, ...]:
    if optimizer.state == "bfloat16":
        return BF16_MOMENTS
    return QUANTIZED_MOMENTS if _is_8bit(optimizer, rank) else (FIRST_MOMENT, SECOND_MOMENT)


def _is_8bit(optimizer: Optimizer, rank: int) -> bool:
    return optimizer.is_8bit and rank == 2


def _make_update_module(
    optimizer: Optimizer, rank: int, matrix_layout: Callable[[], MatrixLayout]
) -> tuple[type[Module], dict[str, Any]]:
    import popxl
    from popxl_addons.optimizers import AdamOptimizerStep

    kwargs = {"beta1": optimizer.beta1, "beta2": optimizer.beta2, "eps": optimizer.eps}
    if _is_8bit(optimizer, rank):
        from popxl_addons.optimizers import Adam8bitOptimizerStep

        return Adam8bitOptimizerStep, {**kwargs, "axis": matrix_layout().unsharded_axis}
    first, second = (popxl.dtype.from_name(slot.dtype) for slot in _state_slots(optimizer, rank))
    return AdamOptimizerStep, {**kwargs, "first_order_dtype": first, "second_order_dtype": second}


ADAMW = OptimizerSpec(
    (FIRST_MOMENT, SECOND_MOMENT, *QUANTIZED_MOMENTS), _state_slots, _make_update_module
)
