"""Which ops the host does.

An op is *hosted* if it moves an entry of a remote buffer, if a graph that it runs holds a hosted
op, or if it calls a graph that is compiled apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from popxl._core.aliases import modified_inputs
from popxl._core.regions import regions
from popxl._lower.hostside import host_rule
from popxl.ops.remote import REMOTE_LOAD, REMOTE_STORE

if TYPE_CHECKING:
    from popxl._core.op import Op
    from popxl.graph import Graph
    from popxl.tensor import Tensor


class Hosted:
    """What is known of the graphs of one program; each is looked at once."""

    def __init__(self) -> None:
        self._hosted: dict[Graph, bool] = {}
        self._inlined: dict[Graph, bool] = {}

    def is_hosted(self, op: Op) -> bool:
        """Whether the host does `op`, or what it runs in part."""
        if op.defn in (REMOTE_LOAD, REMOTE_STORE):
            return True
        found = [r.graph for r in regions(op) if r.kind != "derivative"]
        return any(graph._apart is not None or self.has_hosted(graph) for graph in found)

    def has_hosted(self, graph: Graph) -> bool:
        """Whether `graph` holds a hosted op."""
        if graph not in self._hosted:
            self._hosted[graph] = any(map(self.is_hosted, graph._ops))
        return self._hosted[graph]

    def is_inlined(self, op: Op) -> bool:
        """Whether a call is taken apart where it stands, because its graph does little but move
        entries, or passes its inputs on."""
        found = regions(op)
        if len(found) != 1 or found[0].count != 1 or found[0].kind != "always":
            return False
        graph = found[0].graph
        if graph not in self._inlined:
            self._inlined[graph] = self._can_be_inlined(graph)
        return self._inlined[graph] and not op.modified_inputs()

    def _can_be_inlined(self, graph: Graph) -> bool:
        if graph._apart is not None or modified_inputs(graph):
            return False
        if not self.has_hosted(graph):
            return any(_passed_on(t) for t in graph._outputs)
        return all(
            op.defn in (REMOTE_LOAD, REMOTE_STORE)
            or host_rule(op) is not None
            or is_same(op)
            or self.is_inlined(op)
            for op in graph._ops
        )


def _passed_on(t: Tensor) -> bool:
    """Whether an output of a graph is one of its inputs, unchanged."""
    while t._producer is not None and is_same(t._producer):
        t = t._producer.inputs[0]
    return t._producer is None


def is_same(op: Op) -> bool:
    """Whether the op's result is its input."""
    return op.defn.same is not None and op.inplace is None and op.defn.same(op)
