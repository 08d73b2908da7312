"""Stacks: layers one after the other, those of a phase in one loop of the program."""

from __future__ import annotations

from collections.abc import Sequence

import popxl
from modelling.phases.buffers import over_layers
from modelling.phases.phase import Phase


def stack_forward(phase: Phase, seeds: Sequence[popxl.Tensor], rows: range | None = None) -> None:
    """Layers of a phase.

    Args:
        seeds: the step's seed; none if nothing is random.
        rows: which layers; default: all.
    """

    def body(row: popxl.Tensor, *seeds: popxl.Tensor) -> list[popxl.Tensor]:
        phase.forward(row, *seeds)
        return []

    over_layers(rows or range(phase.entries), body, (), seeds)


def stack_backward(
    phase: Phase,
    squares: popxl.Tensor,
    seeds: Sequence[popxl.Tensor],
    rows: range | None = None,
) -> popxl.Tensor:
    """The gradients of layers of a phase, from the last layer to the first.

    Args:
        squares: sum of the squares of the gradients so far.
        rows: which layers, in their order; default: all.

    Returns:
        `squares`, with those of these layers added.
    """

    def body(row: popxl.Tensor, squares: popxl.Tensor, *seeds: popxl.Tensor) -> list[popxl.Tensor]:
        return [squares + phase.backward(row, *seeds)]

    order = (rows or range(phase.entries))[::-1]
    (total,) = over_layers(order, body, [squares], seeds)
    return total
