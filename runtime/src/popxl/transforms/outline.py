"""Outlining: compiles a graph as a separate executable."""

from __future__ import annotations

from collections.abc import Sequence

from popxl.graph import Graph, OutlineInfo
from popxl.tensor import Tensor


def outline(graph: Graph, saved: Sequence[Tensor] = ()) -> None:
    """Compiles `graph` as a separate executable, with bitwise equal results at every call site.

    What XLA makes of a computation depends on what surrounds it: it merges neighbouring kernels,
    in which a product and a sum then round once instead of twice, and leaves out what nobody uses.
    So equal graphs in different surroundings may differ in their last bits. An outlined graph has
    the same bits at all its calls: no two calls share an executable, and XLA merges no kernel of
    the graph with what surrounds it. Graphs that load from or store to remote buffers cannot be
    one executable; for them nothing changes, nor for graphs that are run as gradients of loops.

    A call computes and returns only what the program uses of it.

    Args:
        saved: tensors of the graph that its gradient takes. They are written to memory at every
            call that computes them, whether the call returns them or not, so that calls which use
            different outputs have the same bits.

    Raises:
        ValueError: a tensor of `saved` is not of the graph.
    """
    for t in saved:
        if t._graph is not graph:
            raise ValueError(f"outline: {t.id!r} is not in graph {graph.id!r}")
    graph._outlined = OutlineInfo(tuple(saved))
    graph._invalidate_analyses()
