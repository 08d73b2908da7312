"""Registry of optimizers and their state slots: the tensors that each stores per weight."""

from __future__ import annotations

from config.optimizer_state.adafactor import ADAFACTOR, Adafactor
from config.optimizer_state.adamw import ADAMW
from config.optimizer_state.state_slots import (
    MASTER_WEIGHT,
    RESIDUAL,
    RESIDUAL_SLOTS,
    STEP_COUNTER,
    OptimizerSpec,
    StateSlot,
)

__all__ = [
    "MASTER_WEIGHT",
    "OPTIMIZERS",
    "RESIDUAL",
    "RESIDUAL_SLOTS",
    "STATE_SLOTS",
    "Adafactor",
    "OptimizerSpec",
    "StateSlot",
]

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": ADAMW,
    "adafactor": ADAFACTOR,
}

STATE_SLOTS = {
    slot.name: slot
    for slot in (
        *(STEP_COUNTER, MASTER_WEIGHT, RESIDUAL_SLOTS["8bit_residual8"]),
        *(slot for spec in OPTIMIZERS.values() for slot in spec.slots),
    )
}
"""State slots of all optimizers, by name."""
