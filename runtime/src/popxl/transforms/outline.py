"""Graphs that are executables of their own."""

from __future__ import annotations

from collections.abc import Sequence

from popxl.graph import Graph, Outlined
from popxl.tensor import Tensor


def outline(graph: Graph, first: Sequence[Tensor] = ()) -> None:
    """Let `graph` be an executable of its own, the same wherever the program calls it.

    What XLA makes of a computation depends on what surrounds it: it merges neighbouring kernels,
    in which a product and a sum then round once instead of twice, and leaves out what nobody uses.
    So equal graphs in different surroundings may differ in their last bits. A graph that is
    is outlined has the same bits at all its calls. Its calls cost a launch each, and all its
    outputs are written out. Graphs that load from or store to remote buffers cannot be one
    executable; for them nothing changes, nor for graphs that are run as gradients of loops.

    Args:
        first: tensors of the graph. If any are given, there are two executables: one for them, and
            one for the rest of the graph, which calls leave out that use nothing of it. So a graph
            that is called again for its gradient does not compute again what only its own output
            needs.

    Raises:
        ValueError: a tensor of `first` is not of the graph.
    """
    for t in first:
        if t._graph is not graph:
            raise ValueError(f"outline: {t.id!r} is not in graph {graph.id!r}")
    graph._outlined = Outlined(tuple(first))
    graph._changes()
