"""Values with the same bits wherever their graph is run: the op `hold`, put into graphs.

A forward graph is run in three kinds of places: where its outputs are wanted, where the values that
its gradient graph takes are stored as well, and where they are computed again. XLA would compile
each of them otherwise (see `ops/_hold.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from popxl._core.aliases import modified_owners, owners
from popxl._core.op import Op, add_outputs
from popxl._core.verify import verify_if_asked
from popxl.graph import Graph
from popxl.ops._hold import HOLD
from popxl.tensor import Tensor
from popxl.transforms.autodiff import ExpectedConnectionType, GradGraphInfo


def hold_activations(
    info: GradGraphInfo, inputs: Iterable[Tensor], outputs: Iterable[Tensor]
) -> None:
    """Give what a gradient graph takes from its forward graph, and what it makes of that, the same
    bits whether the forward graph stores it or is run again.

    Held are, in the forward graph and graphs that it calls, the values that the gradient graph
    takes, and those from which one op computes something that is wanted when another op's result
    is not; and in the gradient graph, what it takes. Applies to both graphs in place.

    Args:
        info: a gradient graph.
        inputs: inputs of the forward graph that differ from call to call. Others, such as weights,
            are left to XLA, which computes what depends on them alone once for all calls.
        outputs: outputs of the forward graph that are wanted where it is not run again.
    """
    forward, varying = info.forward_graph, set(inputs)
    taken = [
        (c.fwd_tensor, t)
        for c, t in zip(info.expected_inputs, info.graph.inputs, strict=False)
        if c.connection_type is ExpectedConnectionType.Fwd
    ]
    _hold_in(forward, [source for source, _ in taken], list(outputs))
    for source, t in taken:
        if source in varying or source not in forward.inputs:
            _hold_input(info.graph, t)
    verify_if_asked(forward.ir)


def _hold_in(graph: Graph, taken: list[Tensor], outputs: list[Tensor]) -> None:
    _hold_all(graph, taken)
    _hold_all(graph, _shared(graph, taken, outputs))


def _hold_all(graph: Graph, tensors: Iterable[Tensor]) -> None:
    changed = modified_owners(graph)
    for t in dict.fromkeys(tensors):
        op = t._producer
        if op is None or op.inplace is not None or any(o in changed for o in owners(t)):
            continue
        if "graph" in op.attrs and op.defn.name == "call":
            inner = op.attrs["graph"]
            _hold_in(inner, [inner._outputs[op.outputs.index(t)]], list(inner._outputs))
        elif op.defn is not HOLD:
            _insert(graph, op, t)


def _insert(graph: Graph, op: Op, t: Tensor) -> None:
    """Make `t` the held result of `op`, for all that use it."""
    raw = Tensor._make(graph, t.spec, f"{t.name.rpartition('/')[2]}_free", producer=op)
    op.outputs[op.outputs.index(t)] = raw
    with graph:
        held = Op(HOLD, graph, [raw], {})
    held.outputs.append(t)
    t._producer = held
    graph._ops.insert(graph._ops.index(op) + 1, held)


def _hold_input(graph: Graph, t: Tensor) -> None:
    """Let the ops of `graph` use input `t` held."""
    users = [op for op in graph._ops if t in op.inputs]
    with graph:
        op = Op(HOLD, graph, [t], {})
        (held,) = add_outputs(op, [t.spec], [f"{t.name.rpartition('/')[2]}_held"])
    for user in users:
        user.inputs[:] = [held if i is t else i for i in user.inputs]
    graph._ops.insert(0, op)


def _shared(graph: Graph, taken: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
    """Values whose uses do not all belong to the same of the two: `taken` and `outputs`."""
    needed = [_makers(graph, wanted) for wanted in (taken, outputs)]
    uses: dict[Tensor, set[tuple[bool, ...]]] = {t: {(False, True)} for t in outputs}
    for op in graph._ops:
        case = tuple(op in makers for makers in needed)
        if not op.view and any(case):
            for t in op.inputs:
                for owner in owners(t):
                    uses.setdefault(owner, set()).add(case)
    return [t for t, cases in uses.items() if len(cases) > 1]


def _makers(graph: Graph, wanted: Iterable[Tensor]) -> set[Op]:
    """The ops from which `wanted` are computed."""
    found: set[Op] = set()
    needed = {o for t in wanted for o in (t, *owners(t))}
    for op in reversed(graph._ops):
        written = {o for i in op.modified_inputs() for o in owners(op.inputs[i])}
        if needed.isdisjoint((*op.outputs, *written)):
            continue
        found.add(op)
        needed.update(o for t in op.inputs for o in (t, *owners(t)))
    return found
