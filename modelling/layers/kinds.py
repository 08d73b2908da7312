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
class Layers:
    """The layers of a model.

    Attributes:
        kinds: a module for each kind of layer; all have the same variables, but for adapters.
        order: of each layer in turn, which kind it is.
    """

    kinds: Sequence[addons.Module]
    order: Sequence[int]

    @classmethod
    def of(cls, names: Sequence[Item], make: Callable[[Item], addons.Module]) -> Layers:
        """Layers whose kinds have names.

        Args:
            names: of each layer in turn, that of its kind.
            make: a module of a kind.
        """
        kinds = list(dict.fromkeys(names))
        return cls([make(kind) for kind in kinds], [kinds.index(name) for name in names])

    def part(self, rows: range) -> Layers:
        """Some neighbouring layers, and the kinds that they are of."""
        return Layers.of(self.order[rows.start : rows.stop], self.kinds.__getitem__)

    def wrapped(self, wrap: Callable[[Any], addons.Module]) -> Layers:
        """The same with something around each module."""
        return Layers([wrap(module) for module in self.kinds], self.order)

    def runs(self) -> list[tuple[int, range]]:
        """Neighbouring layers of one kind: the kind and their rows."""
        groups = groupby(enumerate(self.order), key=itemgetter(1))
        numbered = [(kind, [row for row, _ in members]) for kind, members in groups]
        return [(kind, range(rows[0], rows[-1] + 1)) for kind, rows in numbered]

    def first_of_kinds(self, of_layers: Sequence[Item]) -> list[Item]:
        """The items of the first layer of each kind, from a sequence with one for each layer."""
        return [of_layers[self.order.index(kind)] for kind in range(len(self.kinds))]
