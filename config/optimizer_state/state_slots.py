"""What an optimizer keeps for a weight, and its record."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from config.run import Optimizer
    from popxl_addons import Module
    from popxl_addons.optimizers.adafactor import MatrixLayout


@dataclass(frozen=True)
class StateSlot:
    """An array that is kept for each weight.

    Attributes:
        of: what it is, such as a moment.
        over: an element for each of the weight's, for each of its rows or columns, for each group
            of 32 neighbours, or one for all.
    """

    quantity: str
    per: Literal["element", "row", "column", "block", "weight"] = "element"
    dtype: Literal["float32", "bfloat16", "int16", "int8", "uint8"] = "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return {"float32": 4, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1}[self.dtype]

    @property
    def name(self) -> str:
        """In checkpoints, and in the update's graph."""
        return f"{self.quantity}_{self.per}s" if self.per in ("row", "column") else self.quantity

    @property
    def transposed(self) -> StateSlot:
        """The slot of the transposed weight: rows and columns change places."""
        axes: dict[str, Any] = {"row": "column", "column": "row"}
        return replace(self, per=axes.get(self.per, self.per))

    def shape(self, weight: tuple[int, ...], axis: int = -1) -> tuple[int, ...]:
        """For a weight of a shape, whose groups are along an axis."""
        if self.per == "block":
            from popxl_addons.optimizers.state_8bit import scales_shape

            return scales_shape(weight, axis % len(weight))
        of = {"element": weight, "row": weight[:1], "column": weight[1:], "weight": ()}
        return of[self.per]

    def nbytes(self, weight: tuple[int, ...]) -> int:
        """For a weight of a shape."""
        return math.prod(self.shape(weight)) * self.itemsize


FIRST_MOMENT, SECOND_MOMENT = StateSlot("first_order"), StateSlot("second_order")
STEP_COUNTER = StateSlot("step", "weight")
"""The number of the step, which every optimizer keeps."""

MASTER_WEIGHT = StateSlot("master")
"""The float32 copy of a 16-bit weight (execution.master_weights), which any optimizer may keep."""

RESIDUAL = "residual"
RESIDUAL_SLOTS = {
    "8bit_residual8": StateSlot(RESIDUAL, dtype="int8"),
    "8bit_residual16": StateSlot(RESIDUAL, dtype="int16"),
}
"""What rounding to 16 bits took from a weight, which any optimizer may keep, by its `state`."""


@dataclass(frozen=True)
class OptimizerSpec:
    """All that a run needs to know of an optimizer.

    The functions take its fields, `training.optimizer`. The runtime is imported when a graph is
    made: configurations are read without it.

    Attributes:
        slots: what it may keep for a weight, besides `STEP_COUNTER`.
        keeps: which of them it keeps for a weight of so many axes.
        step: the module that updates a variable of so many axes, and its settings that other
            optimizers do not have. `MatrixLayout` says which matrices the variable belongs to.
        shared_parts: whether replicas of a tensor-parallel group may hold the same part of a
            weight.
    """

    slots: tuple[StateSlot, ...]
    slots_for: Callable[[Optimizer, int], tuple[StateSlot, ...]]
    build_step: Callable[
        [Optimizer, int, Callable[[], MatrixLayout]], tuple[type[Module], dict[str, Any]]
    ]
    allows_shard_replicas: bool = True
