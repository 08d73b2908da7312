"""The phase of a layer's experts, a group of which is on the device at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import popxl
import popxl_addons as addons
from modelling.phases.buffers import Port, over_layers
from modelling.phases.phase import Phase
from modelling.phases.settings import Settings
from modelling.phases.step import StepInputs


class ExpertsPhase(Phase):
    """Groups of experts. Each layer has as many entries as groups, one after the other.

    Args:
        begin: lets gradients be zero that the groups of a layer add to.
        layers: how many there are; other arguments as `Phase` has them.
    """

    def __init__(
        self,
        name: str,
        module: addons.Module,
        inputs: Mapping[str, Port],
        outputs: Sequence[Port],
        settings: Settings,
        layers: int,
        begin: Callable[[], None],
    ) -> None:
        self._groups, self._begin = settings.config.execution.expert_groups, begin
        super().__init__(name, module, inputs, outputs, settings, layers * self._groups)

    def _keep_resident(self, layers: int) -> None:
        super()._keep_resident(layers * self._groups)

    def forward_all(self, layer: popxl.Tensor, step: StepInputs) -> None:
        """Run all groups of a layer forwards, one after the other."""

        def body(row: popxl.Tensor, *given: popxl.Tensor) -> list[popxl.Tensor]:
            self.forward(row, step.of(given))
            return []

        first = layer * self._groups
        over_layers(range(self._groups), body, (), step.tensors, first)

    def backward_all(
        self, layer: popxl.Tensor, step: StepInputs, squares: popxl.Tensor
    ) -> popxl.Tensor:
        """Run all groups of a layer backwards, the last one first.

        Returns:
            `squares`, and those of the groups' gradients, see `Phase.backward`.
        """
        if self.bwd is None:
            return squares

        def body(
            row: popxl.Tensor, squares: popxl.Tensor, *given: popxl.Tensor
        ) -> list[popxl.Tensor]:
            return [squares + self.backward(row, step.of(given))]

        with self._part("backward"):
            self._begin()
        rows, first = range(self._groups)[::-1], layer * self._groups
        (squares,) = over_layers(rows, body, [squares], step.tensors, first)
        return squares
