"""State slots: the tensors that an optimizer stores for each weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from config.training import Optimizer
    from popxl_addons import Module
    from popxl_addons.optimizers.adafactor import MatrixLayout


@dataclass(frozen=True)
class StateSlot:
    """A state slot of an optimizer: a tensor, such as a moment, that is stored for each weight.

    Attributes:
        quantity: name of the stored quantity, such as a moment.
        per: granularity: one value per element, row, column or block of 32 elements of the weight,
            or one value per weight.
    """

    quantity: str
    per: Literal["element", "row", "column", "block", "weight"] = "element"
    dtype: Literal["float32", "bfloat16", "int16", "int8", "uint8"] = "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of one value of the state tensor."""
        return {"float32": 4, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1}[self.dtype]

    @property
    def name(self) -> str:
        """Name of the state tensor in checkpoints and in the graph of the optimizer."""
        return f"{self.quantity}_{self.per}s" if self.per in ("row", "column") else self.quantity

    @property
    def transposed_slot(self) -> StateSlot:
        """State slot of the transposed weight, with rows and columns exchanged."""
        axes: dict[str, Any] = {"row": "column", "column": "row"}
        return replace(self, per=axes.get(self.per, self.per))

    def shape(self, weight_shape: tuple[int, ...], axis: int = -1) -> tuple[int, ...]:
        """Shape of the state tensor that belongs to a weight of the given shape.

        `axis` is the axis of quantization blocks.
        """
        if self.per == "block":
            from popxl_addons.optimizers.state_8bit import scales_shape

            return scales_shape(weight_shape, axis % len(weight_shape))
        shapes = {
            "element": weight_shape,
            "row": weight_shape[:1],
            "column": weight_shape[1:],
            "weight": (),
        }
        return shapes[self.per]

    def nbytes(self, weight_shape: tuple[int, ...]) -> int:
        """Bytes of the state tensor that belongs to a weight of the given shape."""
        return math.prod(self.shape(weight_shape)) * self.itemsize


FIRST_MOMENT, SECOND_MOMENT = StateSlot("first_order"), StateSlot("second_order")
STEP_COUNTER = StateSlot("step", "weight")
"""Step counter, which every optimizer stores."""

MASTER_WEIGHT = StateSlot("master")
"""Float32 copy of a 16-bit weight (execution.master_weights), for any optimizer."""

RESIDUAL = "residual"
RESIDUAL_SLOTS = {
    "8bit_residual8": StateSlot(RESIDUAL, dtype="int8"),
    "8bit_residual16": StateSlot(RESIDUAL, dtype="int16"),
}
"""Residual of rounding a weight to 16 bits, by the optimizer's `state`; for any optimizer."""


@dataclass(frozen=True)
class OptimizerSpec:
    """State slots (tensors stored per weight) and update rule of an optimizer.

    The functions take the fields of `training.optimizer` and a variable's rank. They import the
    runtime only when they build a graph, so configurations can be read without it.

    Attributes:
        slots: all slots that the optimizer can have, besides `STEP_COUNTER`.
        slots_for: returns the slots for a weight.
        build_step: returns the module that updates a variable, and keyword arguments of its
            `build` that are specific to the optimizer. Its last argument returns the layout of the
            variable's matrices.
        allows_shard_replicas: True if several tensor-parallel replicas may hold the same shard.
    """

    slots: tuple[StateSlot, ...]
    slots_for: Callable[[Optimizer, int], tuple[StateSlot, ...]]
    build_step: Callable[
        [Optimizer, int, Callable[[], MatrixLayout]], tuple[type[Module], dict[str, Any]]
    ]
    allows_shard_replicas: bool = True
