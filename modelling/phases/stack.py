"""Stacks: layers one after the other, those of a phase in one loop of the program."""

from __future__ import annotations

import popxl
from modelling.phases.buffers import over_layers
from modelling.phases.phase import Phase
from modelling.phases.step import StepInputs, Update


def stack_forward(phase: Phase, step: StepInputs, rows: range | None = None) -> None:
    """Layers of a phase.

    Args:
        rows: which layers; default: all.
    """

    def body(row: popxl.Tensor, *given: popxl.Tensor) -> list[popxl.Tensor]:
        phase.forward(row, step.of(given))
        return []

    over_layers(rows or range(phase.entries), body, (), step.tensors)


def stack_backward(
    phase: Phase, squares: popxl.Tensor, step: StepInputs, rows: range | None = None
) -> popxl.Tensor:
    """The gradients of layers of a phase, from the last layer to the first.

    Args:
        squares: sum of the squares of the gradients so far.
        rows: which layers, in their order; default: all.

    Returns:
        `squares`, with those of these layers added.
    """

    def body(row: popxl.Tensor, squares: popxl.Tensor, *given: popxl.Tensor) -> list[popxl.Tensor]:
        return [squares + phase.backward(row, step.of(given))]

    order = (rows or range(phase.entries))[::-1]
    (total,) = over_layers(order, body, [squares], step.tensors)
    return total


def stack_update(phase: Phase, update: Update) -> None:
    """The optimizer's update of all layers whose variables a phase keeps."""

    def body(row: popxl.Tensor, *given: popxl.Tensor) -> list[popxl.Tensor]:
        phase.update(row, Update(*given))
        return []

    if phase.optimizer is not None and phase.keeps_variables:
        over_layers(range(phase.entries), body, (), update.tensors)
