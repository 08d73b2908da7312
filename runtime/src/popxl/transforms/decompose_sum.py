"""Transform that decomposes sums of many gradients into running sums."""

from __future__ import annotations

from popxl._analysis.verify import verify_if_enabled
from popxl._ir.op import Op
from popxl._ir.op_registry import registry
from popxl.graph import Graph
from popxl.tensor import Tensor
from popxl.transforms.gradient_ops import GRAD_SUM


def decompose_sum(graph: Graph) -> Graph:
    """Replaces each sum of gradients by additions right after each term is produced.

    Only the running total is then live, instead of all terms until the last one is there. Applies
    to the graph in place.

    Returns:
        The same graph.
    """
    # Each op has a place: where it stood, or for an addition, the place of the last op that it
    # needs and its number among the additions.
    positions = {op: (i, 0) for i, op in enumerate(graph._ops)}
    sums = [op for op in graph._ops if op.defn is GRAD_SUM]
    for op in sums:
        _decompose_op(graph, op, positions)
    for op in sums:
        del positions[op]
    graph._ops[:] = sorted(positions, key=positions.__getitem__)
    graph._invalidate_analyses()
    verify_if_enabled(graph.ir)
    return graph


def _decompose_op(graph: Graph, op: Op, op_positions: dict[Op, tuple[int, int]]) -> None:
    def position(t: Tensor) -> tuple[int, int]:
        return (-1, 0) if t._producer is None else op_positions[t._producer]

    terms = sorted(op.inputs, key=position)
    total = terms[0]
    for i, term in enumerate(terms[1:]):
        with graph:
            add = Op(registry()["add"], graph, [total, term], {})
        if i == len(terms) - 2:
            out = op.outputs[0]
            out._producer = add
        else:
            out = Tensor._make(graph, op.outputs[0].spec, "sum", producer=add)
        add.outputs.append(out)
        op_positions[add] = max(position(total), position(term))[0], len(op_positions)
        total = out
