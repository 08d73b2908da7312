"""The modules of a model with several layer types, such as sliding-window and full attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

import popxl_addons as addons

Item = TypeVar("Item")


@dataclass(frozen=True)
class LayerModules:
    """A model's layers: one module for each distinct layer type, and the type of each layer.

    Attributes:
        modules: one for each layer type; all have the same variables, except for adapters.
        type_of_layer: for each layer, the index of its type in `modules`.
    """

    modules: Sequence[addons.Module]
    type_of_layer: Sequence[int]

    @classmethod
    def from_types(
        cls, layer_types: Sequence[Item], make_layer: Callable[[Item], addons.Module]
    ) -> LayerModules:
        """Creates one module for each distinct layer type.

        Args:
            layer_types: the type of each layer.
            make_layer: creates the module of a type.
        """
        types = list(dict.fromkeys(layer_types))
        return cls([make_layer(t) for t in types], [types.index(t) for t in layer_types])

    def slice_layers(self, layers: range) -> LayerModules:
        """Returns the layers of a range of indices, with the modules of their types."""
        types = self.type_of_layer[layers.start : layers.stop]
        return LayerModules.from_types(types, self.modules.__getitem__)

    def map_modules(self, wrap: Callable[[Any], addons.Module]) -> LayerModules:
        """Returns the layers with each module replaced by `fn(module)`."""
        return LayerModules([wrap(module) for module in self.modules], self.type_of_layer)

    def runs_of_one_type(self) -> list[tuple[int, range]]:
        """Splits layers into runs of the same type: (type index, range of layer indices) each."""
        groups = groupby(enumerate(self.type_of_layer), key=itemgetter(1))
        runs = [(index, [layer for layer, _ in members]) for index, members in groups]
        return [(index, range(layers[0], layers[-1] + 1)) for index, layers in runs]

    def first_of_each_type(self, items: Sequence[Item]) -> list[Item]:
        """Picks from a list with one item per layer the item of the first layer of each type."""
        return [items[self.type_of_layer.index(index)] for index in range(len(self.modules))]
