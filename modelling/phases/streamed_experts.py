"""Streamed experts: loaded to the device one group of experts at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import popxl
from modelling.phases.buffers import loop_over_layers
from modelling.phases.phase import Phase
from modelling.phases.step_inputs import StepInputs


@dataclass(frozen=True)
class StreamedExperts:
    """The streamed experts of a phase's layers: each group of experts is loaded and run in turn.

    Attributes:
        phase: phase with one row per group; the groups of a layer are consecutive rows.
        groups: number of groups of a layer.
        zero_grads: zeros the gradients that the groups of a layer add to.
    """

    phase: Phase
    groups: int
    zero_grads: Callable[[], None]

    def forward(self, layer_index: popxl.Tensor, step: StepInputs) -> None:
        """Run all expert groups of a layer forward; the layer's index is an int32 scalar."""

        def forward_group(row: popxl.Tensor, *tensors: popxl.Tensor) -> list[popxl.Tensor]:
            self.phase.forward(row, step.with_tensors(tensors))
            return []

        first = layer_index * self.groups
        loop_over_layers(range(self.groups), forward_group, (), step.tensors, first)

    def backward(
        self, layer_index: popxl.Tensor, step: StepInputs, sum_squares: popxl.Tensor
    ) -> popxl.Tensor:
        """Run all expert groups of a layer backward, last group first.

        Returns:
            `sum_squares` plus the squares of the groups' gradients; see `Phase.backward`.
        """
        if self.phase.bwd is None:
            return sum_squares

        def backward_group(
            row: popxl.Tensor, sum_squares: popxl.Tensor, *tensors: popxl.Tensor
        ) -> list[popxl.Tensor]:
            return [self.phase.backward(row, step.with_tensors(tensors), sum_squares)]

        with self.phase.label_in_plan("backward"):
            self.zero_grads()
        rows, first = range(self.groups)[::-1], layer_index * self.groups
        (sum_squares,) = loop_over_layers(rows, backward_group, [sum_squares], step.tensors, first)
        return sum_squares
