"""Stacks of layers in generation."""

from __future__ import annotations

from collections.abc import Iterator

from popxl_addons import Module, NamedTensors
from popxl_addons.variable_factory import NamedVariableFactories


class Stack(Module):
    """Layers of one kind: one graph, called with the weights of each. Those of layer i are in `i`.

    Args:
        layers: how many there are.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers

    def weights_of_layers(
        self, layer: NamedVariableFactories, first: NamedVariableFactories | None = None
    ) -> Iterator[NamedTensors]:
        """Add inputs for the variables of each layer.

        Args:
            layer: variables of every layer.
            first: those that the first layer alone has.
        """
        for i in range(self.layers):
            own = layer.copy()
            if first is not None and i == 0:
                own.update(first)
            yield self.add_variable_inputs(i, own)
