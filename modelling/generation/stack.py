"""Stacks of layers in generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from modelling.layers import Layers
from popxl import Tensor
from popxl_addons import Module, NamedTensors
from popxl_addons.variable_factory import NamedVariableFactories

Inputs = Sequence[Tensor | list[Tensor]]
"""Inputs of a graph; lists of tensors are inputs one after the other."""


def joined(*trees: NamedVariableFactories) -> NamedVariableFactories:
    """The variables of all trees, merged; a name that is in several must mean the same variable."""
    return NamedVariableFactories.from_dict(
        {name: factory for tree in trees for name, factory in tree.to_dict().items()}
    )


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
            own = layer if first is None or i else joined(layer, first)
            yield self.add_variable_inputs(i, own)

    def at_one_position(
        self,
        layers: Module | Layers,
        x: Tensor,
        caches: Sequence[Tensor],
        others: Callable[[slice], Inputs],
    ) -> tuple[Tensor, ...]:
        """Call all layers on one token of each sample.

        Args:
            layers: of one kind, or several; each takes x, its keys and values, and `others`, and
                returns x, and the new keys and values.
            x: (batch, 1, hidden).
            caches: keys and values, those of each layer after those of the one before.
            others: further inputs of the layer whose keys and values are in a slice of `caches`.

        Returns:
            x, and all layers' new caches.
        """
        if isinstance(layers, Module):
            layers = Layers([layers], [0] * self.layers)
        pairs = [slice(2 * i, 2 * i + 2) for i in range(self.layers)]
        made = [
            kind.create_graph(x, caches[pair], *others(pair))
            for kind, pair in zip(layers.kinds, layers.first_of_kinds(pairs), strict=True)
        ]
        new: list[Tensor] = []
        for i, weights in enumerate(self.weights_of_layers(made[0][0])):
            block = made[layers.order[i]][1]
            given = [t for t in others(pairs[i]) if not isinstance(t, list) or t]
            x, *updated = block.bind(weights).call(x, *caches[pairs[i]], *given)
            new += updated
        return x, *new
