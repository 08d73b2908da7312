"""Repeat all ops of a graph several times, in place."""

from __future__ import annotations

import popxl
from popxl import Graph, ops
from popxl_addons.transforms.move_ops import move_ops
from popxl_addons.utils import suffix_graph_name


def repeat_graph(graph: popxl.Graph, repeat_count: int) -> Graph:
    """Repeat all ops of `graph` `repeat_count` times, in place.

    All its ops move into a new graph, and `graph` (the main graph too) is left with one repeat of
    it. What the ops take from outside, such as variables, are inputs by reference of the new
    graph. Host loads and stores run once for each repetition: set `ir.num_host_transfers` to the
    count.

    If `graph` has outputs, they are those of the last repetition, and as in `ops.repeat` the first
    inputs take the outputs of the repetition before.

    Returns:
        The new graph; `graph` itself, unchanged, for a count of at most 1.

    Raises:
        ValueError: the outputs do not fit the first inputs.
    """
    if repeat_count <= 1:
        return graph
    outputs, inputs = list(graph.outputs), list(graph.inputs)
    carried = inputs[: len(outputs)]
    if [t.spec for t in carried] != [t.spec for t in outputs]:
        raise ValueError(
            f"graph {graph.id!r} cannot be repeated: its outputs {[t.spec for t in outputs]} must "
            f"fit its first inputs {[t.spec for t in carried]}"
        )
    body, outside = move_ops(
        graph,
        graph.ops,
        suffix_graph_name(graph.name, f"repeat_{repeat_count}"),
        by_ref=lambda t: t not in carried,
        first_inputs=inputs,
    )
    inside = dict(zip(outside, body.inputs, strict=True))
    with body:
        for t in outputs:
            popxl.graph_output(inside.get(t, t))
    with graph:
        graph._outputs[:] = ops.repeat(body, repeat_count, *outside)
    return body
