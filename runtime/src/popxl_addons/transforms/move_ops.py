"""Move ops from one graph to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import popxl
from popxl import Graph, Tensor


def move_ops(
    graph: Graph,
    moved: Sequence[Any],
    name: str,
    by_ref: Callable[[Tensor], bool],
    first_inputs: Sequence[Tensor] = (),
) -> tuple[Graph, list[Tensor]]:
    """Move ops of `graph` and their outputs into a new graph.

    Args:
        name: of the new graph.
        by_ref: whether an input, given the tensor of `graph` it stands for, is by reference.
        first_inputs: tensors of `graph` that become the first inputs, used or not.

    Returns:
        The new graph, without outputs, and the tensors of `graph` for its inputs.
    """
    body = graph.ir.create_empty_graph(name)
    made = {t for op in moved for t in op.outputs}
    used = (t for op in moved for t in op.inputs if t not in made)
    outside = list(dict.fromkeys([*first_inputs, *used]))
    with body:
        inside = {
            t: popxl.graph_input(
                t.shape, t.dtype, t.name.replace("/", "_"), by_ref(t), t.meta_shape or None
            )
            for t in outside
        }
    outputs = [t for op in moved for t in op.outputs]
    chosen = set(moved)
    graph._ops[:] = [op for op in graph._ops if op not in chosen]
    graph._invalidate_analyses()
    for op in moved:
        op.inputs[:] = [inside.get(t, t) for t in op.inputs]
        op.graph = body
        body._ops.append(op)
        body._record_calls(op)
    for t in outputs:
        # A tensor is registered by name in its graph, and hashed by both.
        del graph._tensors[t.name]
        t._graph = body
        t._name = body._register_tensor(t, t.name)
    return body, outside
