"""Stacks: the layers of a phase, one after the other, in one loop of the program."""

from __future__ import annotations

from collections.abc import Sequence

import popxl
from modelling.phases.buffers import over_layers
from modelling.phases.phase import Phase


def stack_forward(phase: Phase, seeds: Sequence[popxl.Tensor]) -> None:
    """All layers of a phase.

    Args:
        seeds: the step's seed; none if nothing is random.
    """

    def body(row: popxl.Tensor, *seeds: popxl.Tensor) -> list[popxl.Tensor]:
        phase.forward(row, *seeds)
        return []

    over_layers(range(phase.entries), body, (), seeds)


def stack_backward(
    phase: Phase, squares: popxl.Tensor, seeds: Sequence[popxl.Tensor]
) -> popxl.Tensor:
    """The gradients of all layers of a phase, from the last layer to the first.

    Args:
        squares: sum of the squares of the gradients so far.

    Returns:
        `squares`, with those of these layers added.
    """

    def body(row: popxl.Tensor, squares: popxl.Tensor, *seeds: popxl.Tensor) -> list[popxl.Tensor]:
        return [squares + phase.backward(row, *seeds)]

    (total,) = over_layers(range(phase.entries - 1, -1, -1), body, [squares], seeds)
    return total
