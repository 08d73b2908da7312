"""Graphs that are compiled by themselves."""

from __future__ import annotations

from popxl.graph import Graph


def compile_apart(graph: Graph) -> None:
    """Let `graph` be one executable of its own, the same wherever the program calls it.

    What XLA makes of a computation depends on what surrounds it: it merges neighbouring kernels,
    in which a product and a sum then round once instead of twice, and leaves out what nobody uses.
    So equal graphs in different surroundings may differ in their last bits. A graph that is
    compiled apart has the same bits at all its calls. Its calls cost a launch each, and all its
    outputs are written out. Graphs that load from or store to remote buffers cannot be one
    executable; for them nothing changes, nor for graphs that are run as gradients of loops.
    """
    graph._apart = True
