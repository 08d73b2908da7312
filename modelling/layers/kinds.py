"""Layers of several kinds, such as those with a window and those without."""

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
    """The layers of a model.

    Attributes:
        kinds: a module for each kind of layer; all have the same variables, but for adapters.
        order: of each layer in turn, which kind it is.
    """

    modules: Sequence[addons.Module]
    type_of_layer: Sequence[int]

    @classmethod
    def from_types(
        cls, names: Sequence[Item], make: Callable[[Item], addons.Module]
    ) -> LayerModules:
        """Layers whose kinds have names.

        Args:
            names: of each layer in turn, that of its kind.
            make: a module of a kind.
        """
        kinds = list(dict.fromkeys(names))
        return cls([make(kind) for kind in kinds], [kinds.index(name) for name in names])

    def take(self, rows: range) -> LayerModules:
        """Some neighbouring layers, and the kinds that they are of."""
        types = self.type_of_layer[rows.start : rows.stop]
        return LayerModules.from_types(types, self.modules.__getitem__)

    def map_modules(self, wrap: Callable[[Any], addons.Module]) -> LayerModules:
        """The same with something around each module."""
        return LayerModules([wrap(module) for module in self.modules], self.type_of_layer)

    def runs_of_one_type(self) -> list[tuple[int, range]]:
        """Neighbouring layers of one kind: the kind and their rows."""
        groups = groupby(enumerate(self.type_of_layer), key=itemgetter(1))
        numbered = [(kind, [row for row, _ in members]) for kind, members in groups]
        return [(kind, range(rows[0], rows[-1] + 1)) for kind, rows in numbered]

    def first_of_each_type(self, of_layers: Sequence[Item]) -> list[Item]:
        """The items of the first layer of each kind, from a sequence with one for each layer."""
        return [of_layers[self.type_of_layer.index(kind)] for kind in range(len(self.modules))]
