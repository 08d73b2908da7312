"""Inlining of calls before a graph is scheduled, and barriers around separately compiled graphs.

Calls of graphs that do little but move entries are inlined, so that their transfers and the
segments around them are ordered together. A call of an outlined graph computes only the outputs
that the caller uses. Barriers, across which XLA does not fuse, keep the bits equal at all calls of
an outlined graph: at saved values, and between the call and its surroundings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from popxl._analysis.functionalization import (
    FunctionalGraph,
    Node,
    NodeCopier,
    Value,
    effects_of_nodes,
)
from popxl._analysis.memo import Memo
from popxl._ir.regions import Region
from popxl._schedule.index_arithmetic import host_scalar_function
from popxl.ops.remote import REMOTE_LOAD, REMOTE_STORE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Inliner:
    """Inlines small calls in functional graphs; each graph is processed once."""

    def __init__(self) -> None:
        self._memo = Memo()
        self._inlinable: dict[FunctionalGraph, bool] = {}
        self._inlined_graphs: dict[FunctionalGraph, FunctionalGraph] = {}
        self._pruned: dict[tuple[FunctionalGraph, tuple[Value, ...]], _PrunedGraph] = {}

    def __call__(self, graph: FunctionalGraph) -> FunctionalGraph:
        """Returns the graph with small calls inlined."""
        return self._memo.get_or_compute(
            self._inlined_graphs, graph, lambda: self._inline_calls(graph)
        )

    def _inline_calls(self, graph: FunctionalGraph) -> FunctionalGraph:
        copy = NodeCopier({v: Value(v.tensor) for v in graph.inputs})
        inputs = copy.map_values(graph.inputs)
        for node in graph.nodes:
            self._add_node(copy, node, graph.used_values)
        outputs = copy.map_values(graph.outputs)
        return replace(graph, inputs=inputs, nodes=copy.nodes, outputs=outputs)

    def _add_node(self, copier: NodeCopier, node: Node, used_values: set[Value]) -> None:
        if self._should_inline(node):
            self._inline_call(copier, node)
            return
        if not node.is_on_host:
            _add_barriers(copier, node, is_outlined_call)
        elif is_outlined_call(node):
            _add_barriers(copier, node, _runs_on_device)
        if is_outlined_call(node) and not node.regions[0].graph.changed:
            self._call_used_outputs(copier, node, used_values)
        else:
            copier.add(node)

    def _inline_call(self, copier: NodeCopier, node: Node) -> None:
        (region,) = node.regions
        graph = self(region.graph)
        inner = NodeCopier(dict(zip(graph.inputs, _call_inputs(copier, node), strict=True)))
        for n in graph.nodes:
            inner.add(n, node.part)
        copier.nodes += inner.nodes
        for v, position in zip(inner.map_values(graph.outputs), region.outputs, strict=True):
            if position is not None:
                copier.mapping[node.outputs[position]] = v

    # ---- calls that are written out --------------------------------------------------------------
    def _should_inline(self, node: Node) -> bool:
        """True if a call node is replaced by the nodes of its graph.

        Its graph only moves entries, calls outlined graphs or forwards its inputs.
        """
        graph = node.callee
        if graph is None:
            return False
        return self._memo.get_or_compute(
            self._inlinable, graph, lambda: self._can_be_inlined(graph)
        )

    def _can_be_inlined(self, graph: FunctionalGraph) -> bool:
        if graph.is_outlined:
            return False
        if not graph.has_host_nodes:
            return not graph.changed and any(v.node is None for v in graph.outputs)
        return all(
            node.kind == "op"
            and node.op is not None
            and (
                node.op.defn in (REMOTE_LOAD, REMOTE_STORE)
                or host_scalar_function(node.op) is not None
                or is_outlined_call(node)
                or self._should_inline(node)
            )
            for node in graph.nodes
        )

    # ---- outlined graphs ------------------------------------------------------------------------
    def _call_used_outputs(self, copier: NodeCopier, node: Node, used_values: set[Value]) -> None:
        """Adds a call of a separately compiled graph, reduced to the outputs that are used."""
        (region,) = node.regions
        graph = region.graph
        pairs = zip(graph.outputs, region.outputs, strict=True)
        used_outputs = {
            node.outputs[position]: v
            for v, position in pairs
            if position is not None and node.outputs[position] in used_values
        }
        part, arguments, results = self._prune_graph(graph, tuple(used_outputs.values()))
        inner = NodeCopier(dict(zip(graph.inputs, _call_inputs(copier, node), strict=True)))
        if part.nodes:
            outputs = [Value(v.tensor, v.version) for v in results]
            called = Region(part, tuple(range(len(arguments))), tuple(range(len(results))))
            inner.nodes.append(
                Node("op", node.op, inner.map_values(arguments), outputs, (called,), node.part)
            )
            inner.mapping.update(zip(results, outputs, strict=True))
        for n in _live_nodes(
            [n for n in graph.nodes if n.is_rematerialized], used_outputs.values()
        ):
            inner.add(n, node.part)
        copier.nodes += inner.nodes
        copier.mapping.update(
            zip(used_outputs, inner.map_values(used_outputs.values()), strict=True)
        )

    def _prune_graph(self, graph: FunctionalGraph, used_outputs: tuple[Value, ...]) -> _PrunedGraph:
        if (graph, used_outputs) not in self._pruned:
            self._pruned[graph, used_outputs] = _prune_graph(graph, used_outputs)
        return self._pruned[graph, used_outputs]


# ---- boundaries ---------------------------------------------------------------------------------
def is_outlined_call(node: Node | None) -> bool:
    """True if a node calls an outlined graph, which is compiled separately."""
    graph = None if node is None else node.callee
    return graph is not None and graph.is_outlined and not graph.has_host_nodes


def _runs_on_device(node: Node | None) -> bool:
    """True if the devices compute a node once, instead of again at each use as for a view."""
    return node is not None and not (node.is_rematerialized or node.is_on_host)


def _add_barriers(
    copier: NodeCopier, node: Node, needs_barrier: Callable[[Node | None], bool]
) -> None:
    """Adds fusion barriers to the inputs of a node that come from separately compiled nodes."""
    for v in dict.fromkeys(node.inputs):
        if needs_barrier(copier.mapping.get(v, v).node) and v.spec.shape:
            _add_barrier(copier, v)


def _add_barrier(copier: NodeCopier, value: Value) -> None:
    barrier_output = Value(value.tensor, value.version)
    copier.nodes.append(Node("barrier", None, copier.map_values([value]), [barrier_output]))
    copier.mapping[value] = barrier_output


# ---- parts of graphs ----------------------------------------------------------------------------
class _PrunedGraph(NamedTuple):
    """A graph reduced to the nodes that some of its outputs need.

    Attributes:
        arguments: values that the pruned graph takes.
        results: values that it returns: outputs, or the sources of views.
    """

    graph: FunctionalGraph
    arguments: list[Value]
    results: list[Value]


def _prune_graph(graph: FunctionalGraph, outputs: Sequence[Value]) -> _PrunedGraph:
    results = [v for v in _materialized_sources(outputs) if v.node is not None]
    nodes = _live_nodes(graph.nodes, results, [n for n in graph.nodes if effects_of_nodes([n])])
    read = {*results, *(v for n in nodes for v in n.inputs)}
    arguments = [v for v in graph.inputs if v in read]
    copy = NodeCopier({v: Value(v.tensor) for v in arguments})
    inputs, saved = copy.map_values(arguments), _materialized_sources(graph.saved)
    for n in nodes:
        copy.add(n)
        for v in n.outputs:
            if v in saved:
                _add_barrier(copy, v)
    part = replace(
        graph, inputs=inputs, nodes=copy.nodes, outputs=copy.map_values(results), saved=()
    )
    return _PrunedGraph(part, arguments, results)


def _live_nodes(
    nodes: Sequence[Node], values: Iterable[Value], effect_nodes: Sequence[Node] = ()
) -> list[Node]:
    """Returns the nodes that `values` and `effect_nodes` depend on (dead-code elimination)."""
    live, nodes_in_use = set(values), []
    for n in reversed(nodes):
        if n in effect_nodes or not live.isdisjoint(n.outputs):
            nodes_in_use.append(n)
            live.update(n.inputs)
    return nodes_in_use[::-1]


def _call_inputs(copier: NodeCopier, node: Node) -> list[Value]:
    """Returns the caller's values for the inputs of a called graph."""
    return copier.map_values(
        node.inputs[position] for position in node.regions[0].inputs if position is not None
    )


def _materialized_sources(values: Iterable[Value]) -> dict[Value, None]:
    """Returns the stored values that `values` are computed from by views and zeros.

    Views and zeros are recomputed.
    """
    sources: dict[Value, None] = {}
    worklist, seen = list(values), set()
    while worklist:
        v = worklist.pop()
        if v in seen:
            continue
        seen.add(v)
        if v.node is not None and v.node.is_rematerialized:
            worklist += v.node.inputs
        else:
            sources[v] = None
    return sources
