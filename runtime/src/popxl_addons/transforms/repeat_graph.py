"""A graph that runs another one several times."""

from __future__ import annotations

import popxl
from popxl import Graph, ops
from popxl_addons.transforms.autodiff import copy_inputs
from popxl_addons.utils import suffix_graph_name


def repeat_graph(graph: popxl.Graph, repeat_count: int) -> Graph:
    """Create a graph with the inputs and outputs of `graph` that repeats it.

    As in `ops.repeat`, the first inputs take the outputs of the iteration before.
    """
    repeated = graph.ir.create_empty_graph(suffix_graph_name(graph.name, f"repeat_{repeat_count}"))
    with repeated:
        for t in ops.repeat(graph, repeat_count, *copy_inputs(graph)):
            popxl.graph_output(t)
    return repeated
