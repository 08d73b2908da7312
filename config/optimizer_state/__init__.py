"""Optimizers and the state that each keeps for a weight: a registry, one line each."""

from __future__ import annotations

from config.optimizer_state.adafactor import ADAFACTOR, Adafactor
from config.optimizer_state.adamw import ADAMW
from config.optimizer_state.slots import (
    MASTER,
    RESIDUAL,
    RESIDUALS,
    STEP,
    OptimizerRecord,
    Slot,
)

__all__ = [
    "MASTER",
    "OPTIMIZERS",
    "RESIDUAL",
    "RESIDUALS",
    "SLOTS",
    "Adafactor",
    "OptimizerRecord",
    "Slot",
]

OPTIMIZERS: dict[str, OptimizerRecord] = {
    "adamw": ADAMW,
    "adafactor": ADAFACTOR,
}

SLOTS = {
    slot.name: slot
    for slot in (
        *(STEP, MASTER, RESIDUALS["compact"]),
        *(slot for record in OPTIMIZERS.values() for slot in record.slots),
    )
}
"""All that optimizers may keep, by name."""
