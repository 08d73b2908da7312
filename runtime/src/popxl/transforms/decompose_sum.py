"""Turning sums of many terms into running sums."""

from __future__ import annotations

from popxl._core.op import Op
from popxl._core.opdef import registry
from popxl._core.verify import verify_if_asked
from popxl.graph import Graph
from popxl.tensor import Tensor
from popxl.transforms.gradients import GRAD_SUM


def decompose_sum(graph: Graph) -> Graph:
    """Replace each sum of several gradients by additions right after each term is produced.

    Only the running total is then live, instead of all terms until the last one is there. Applies
    to the graph in place.

    Returns:
        The same graph.
    """
    for op in [op for op in graph._ops if op.defn is GRAD_SUM]:
        _decompose(graph, op)
    verify_if_asked(graph.ir)
    return graph


def _decompose(graph: Graph, op: Op) -> None:
    position = {o: i for i, o in enumerate(graph._ops)}
    terms = sorted(op.inputs, key=lambda t: position.get(t._producer, -1))  # type: ignore[arg-type]
    total = terms[0]
    for i, term in enumerate(terms[1:]):
        last = i == len(terms) - 2
        with graph:
            add = Op(registry()["add"], graph, [total, term], {})
        if last:
            out = op.outputs[0]
            out._producer = add
        else:
            out = Tensor._make(graph, op.outputs[0].spec, "sum", producer=add)
        add.outputs.append(out)
        _insert_after_inputs(graph, add)
        total = out
    graph._ops.remove(op)


def _insert_after_inputs(graph: Graph, op: Op) -> None:
    """Put `op` right after the last of the producers of its inputs."""
    after = [t._producer for t in op.inputs if t._producer is not None]
    at = max((graph._ops.index(p) for p in after), default=-1)
    graph._ops.insert(at + 1, op)
