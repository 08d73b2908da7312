"""Which nodes the host executes.

A node is *hosted* if it moves an entry of a remote buffer, if a graph that it runs holds a hosted
node, or if it calls an outlined graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from popxl._lower.hostside import host_rule
from popxl.ops.remote import REMOTE_LOAD, REMOTE_STORE

if TYPE_CHECKING:
    from popxl._core.functional import Functional, Node


class Hosted:
    """What is known of the graphs of one program; each is looked at once."""

    def __init__(self) -> None:
        self._hosted: dict[Functional, bool] = {}
        self._inlined: dict[Functional, bool] = {}

    def is_hosted(self, node: Node) -> bool:
        """Whether the host executes `node`, or what it runs in part."""
        if node.op is not None and node.op.defn in (REMOTE_LOAD, REMOTE_STORE):
            return True
        found = [r.graph for r in node.regions if r.kind != "derivative"]
        return any(graph.is_outlined or self.has_hosted(graph) for graph in found)

    def has_hosted(self, graph: Functional) -> bool:
        """Whether `graph` holds a hosted node."""
        if graph not in self._hosted:
            self._hosted[graph] = any(map(self.is_hosted, graph.nodes))
        return self._hosted[graph]

    def is_inlined(self, node: Node) -> bool:
        """Whether a call is written out where it stands, because its graph does little but move
        entries, or passes its inputs on."""
        if len(node.regions) != 1:
            return False
        (region,) = node.regions
        if region.count != 1 or region.kind != "always":
            return False
        graph = region.graph
        if graph not in self._inlined:
            self._inlined[graph] = self._can_be_inlined(graph)
        return self._inlined[graph]

    def _can_be_inlined(self, graph: Functional) -> bool:
        if graph.is_outlined or graph.changed:
            return False
        if not self.has_hosted(graph):
            return any(v.node is None for v in graph.outputs)
        return all(
            node.kind == "op"
            and node.op is not None
            and (
                node.op.defn in (REMOTE_LOAD, REMOTE_STORE)
                or host_rule(node.op) is not None
                or self.is_inlined(node)
            )
            for node in graph.nodes
        )
