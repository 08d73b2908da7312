"""Graphs that are executables of their own, and where they are cut in two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from popxl._core.aliases import modified_owners, owners

if TYPE_CHECKING:
    from popxl._core.op import Op
    from popxl.graph import Graph
    from popxl.tensor import Tensor


@dataclass(frozen=True)
class Apart:
    """How a graph is compiled by itself. `first`: see `popxl.transforms.compile_apart`."""

    first: tuple[Tensor, ...]


@dataclass(frozen=True)
class Halves:
    """The ops of a graph: those that make what is wanted first, and the others.

    Attributes:
        crossing: what the first ones make that is wanted, returned, or used by the others; the same
            for all calls.
    """

    first: list[Op]
    rest: list[Op]
    crossing: list[Tensor]


def halves_of(graph: Graph) -> Halves | None:
    """Where `graph` is cut; None if it is one executable, or none of its own."""
    if graph._apart is None or not graph._apart.first or modified_owners(graph):
        return None
    wanted = set(graph._apart.first)
    for op in reversed(graph._ops):
        if not wanted.isdisjoint(op.outputs):
            wanted.update(op.inputs)
    ops = [op for op in graph._ops if not op.view]
    first = [op for op in ops if not wanted.isdisjoint(op.outputs)]
    rest = [op for op in ops if wanted.isdisjoint(op.outputs)]
    read = [*graph._apart.first, *graph._outputs, *(t for op in rest for t in op.inputs)]
    stored = {owner for t in read for owner in owners(t)}
    return Halves(first, rest, [t for op in first for t in op.outputs if t in stored])
