"""Stacks of layers in generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from popxl import Tensor
from popxl_addons import Module, NamedTensors
from popxl_addons.variable_factory import NamedVariableFactories

Inputs = Sequence[Tensor | list[Tensor]]
"""Inputs of a graph; lists of tensors are inputs one after the other."""


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
                for name, factory in first.to_dict().items():  # into levels that both have
                    own.insert(name, factory, overwrite=True)
            yield self.add_variable_inputs(i, own)

    def at_one_position(
        self,
        layer: Module,
        x: Tensor,
        caches: Sequence[Tensor],
        others: Callable[[slice], Inputs],
    ) -> tuple[Tensor, ...]:
        """Call all layers on one token of each sample.

        Args:
            layer: takes x, its keys and values, and `others`; returns x, and the new keys and
                values.
            x: (batch, 1, hidden).
            caches: keys and values, those of each layer after those of the one before.
            others: further inputs of the layer whose keys and values are in a slice of `caches`.

        Returns:
            x, and all layers' new caches.
        """
        first = slice(0, 2)
        facts, block = layer.create_graph(x, caches[first], *others(first))
        new: list[Tensor] = []
        for i, weights in enumerate(self.weights_of_layers(facts)):
            pair = slice(2 * i, 2 * i + 2)
            x, *updated = block.bind(weights).call(x, *caches[pair], *others(pair))
            new += updated
        return x, *new
