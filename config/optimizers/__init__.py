"""The registry of optimizers: one line each."""

from __future__ import annotations

from config.optimizers.adafactor import ADAFACTOR, Adafactor
from config.optimizers.adamw import ADAMW
from config.optimizers.slots import MASTER, STEP, OptimizerRecord, Slot

__all__ = ["MASTER", "OPTIMIZERS", "SLOTS", "Adafactor", "OptimizerRecord", "Slot"]

OPTIMIZERS: dict[str, OptimizerRecord] = {
    "adamw": ADAMW,
    "adafactor": ADAFACTOR,
}

SLOTS = {
    slot.name: slot
    for slot in (STEP, MASTER, *(slot for record in OPTIMIZERS.values() for slot in record.slots))
}
"""All that optimizers may keep, by name."""
