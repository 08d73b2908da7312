"""The experts of layers, a group of which is on the device at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import popxl
from modelling.phases.buffers import loop_over_layers
from modelling.phases.phase import Phase
from modelling.phases.step_inputs import StepInputs


@dataclass(frozen=True)
class StreamedExperts:
    """The experts of layers, in groups.

    Attributes:
        phase: has an entry for each group: those of a layer one after the other.
        groups: of a layer.
        begin: lets gradients be zero that the groups of a layer add to.
    """

    phase: Phase
    groups: int
    zero_grads: Callable[[], None]

    def forward(self, layer: popxl.Tensor, step: StepInputs) -> None:
        """Run all groups of a layer forwards, one after the other."""

        def body(row: popxl.Tensor, *given: popxl.Tensor) -> list[popxl.Tensor]:
            self.phase.forward(row, step.with_tensors(given))
            return []

        first = layer * self.groups
        loop_over_layers(range(self.groups), body, (), step.tensors, first)

    def backward(
        self, layer: popxl.Tensor, step: StepInputs, squares: popxl.Tensor
    ) -> popxl.Tensor:
        """Run all groups of a layer backwards, the last one first.

        Returns:
            `squares`, and those of the groups' gradients, see `Phase.backward`.
        """
        if self.phase.bwd is None:
            return squares

        def body(
            row: popxl.Tensor, squares: popxl.Tensor, *given: popxl.Tensor
        ) -> list[popxl.Tensor]:
            return [self.phase.backward(row, step.with_tensors(given), squares)]

        with self.phase.part("backward"):
            self.zero_grads()
        rows, first = range(self.groups)[::-1], layer * self.groups
        (squares,) = loop_over_layers(rows, body, [squares], step.tensors, first)
        return squares
