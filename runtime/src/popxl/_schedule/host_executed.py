"""Which nodes the host executes.

A node is *host-executed* if it moves an entry of a remote buffer, if a graph that it runs holds
such a node, or if it calls an outlined graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from popxl.ops.remote import REMOTE_LOAD, REMOTE_STORE

if TYPE_CHECKING:
    from popxl._analysis.functional import Functional, Node


class HostExecuted:
    """The host-executed nodes of one program; each graph is looked at once."""

    def __init__(self) -> None:
        self._found: dict[Functional, bool] = {}

    def executes(self, node: Node) -> bool:
        """Whether the host executes `node`, or part of what it runs."""
        if node.op is not None and node.op.defn in (REMOTE_LOAD, REMOTE_STORE):
            return True
        found = [r.graph for r in node.regions if r.kind != "derivative"]
        return any(graph.is_outlined or self.any_in(graph) for graph in found)

    def any_in(self, graph: Functional) -> bool:
        """Whether `graph` holds such a node."""
        if graph not in self._found:
            self._found[graph] = any(map(self.executes, graph.nodes))
        return self._found[graph]
