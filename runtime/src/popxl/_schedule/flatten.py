"""Calls that are taken apart before a routine is made of the graph that makes them.

Calls of graphs that do little but move entries are written out where they stand, so that their
transfers and the segments around them are ordered together. A call of an outlined graph in two
parts becomes a call of each; what is left out of the second if nobody uses it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from popxl._analysis.functional import Copy, Functional, Node, Value
from popxl._analysis.known import Deep
from popxl._ir.regions import Region
from popxl._schedule.index_arithmetic import host_rule
from popxl.ops.remote import REMOTE_LOAD, REMOTE_STORE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Flattener:
    """Takes graphs apart, each once."""

    def __init__(self) -> None:
        self._deep = Deep()
        self._inlined: dict[Functional, bool] = {}
        self._known: dict[Functional, Functional] = {}
        self._halves: dict[Functional, tuple[Functional, Functional] | None] = {}

    def __call__(self, graph: Functional) -> Functional:
        """The same graph with such calls taken apart."""
        return self._deep.once(self._known, graph, lambda: self._taken_apart(graph))

    def _taken_apart(self, graph: Functional) -> Functional:
        copy = Copy({v: Value(v.tensor) for v in graph.inputs})
        inputs = copy.all(graph.inputs)
        for node in graph.nodes:
            self._add(copy, node, graph.used)
        outputs = copy.all(graph.outputs)
        return replace(graph, inputs=inputs, nodes=copy.nodes, outputs=outputs)

    def _add(self, copy: Copy, node: Node, used: set[Value]) -> None:
        if self._is_inlined(node):
            self._write_out(copy, node)
        elif (halves := self._halves_of(node)) is not None:
            self._call_halves(copy, node, halves, used)
        else:
            copy.add(node)

    def _write_out(self, copy: Copy, node: Node) -> None:
        (region,) = node.regions
        graph = self(region.graph)
        inner = Copy(dict(zip(graph.inputs, _given(copy, node), strict=True)))
        for n in graph.nodes:
            inner.add(n, node.part)
        copy.nodes += inner.nodes
        for v, at in zip(inner.all(graph.outputs), region.outputs, strict=True):
            if at is not None:
                copy.new[node.outputs[at]] = v

    # ---- calls that are written out --------------------------------------------------------------
    def _is_inlined(self, node: Node) -> bool:
        """Whether a call is written out where it stands, because its graph does little but move
        entries, or passes its inputs on."""
        graph = node.called
        if graph is None:
            return False
        return self._deep.once(self._inlined, graph, lambda: self._can_be_inlined(graph))

    def _can_be_inlined(self, graph: Functional) -> bool:
        if graph.is_outlined or graph.changed:
            return False
        if not graph.has_host_nodes:
            return any(v.node is None for v in graph.outputs)
        return all(
            node.kind == "op"
            and node.op is not None
            and (
                node.op.defn in (REMOTE_LOAD, REMOTE_STORE)
                or host_rule(node.op) is not None
                or self._is_inlined(node)
            )
            for node in graph.nodes
        )

    # ---- halves ---------------------------------------------------------------------------------
    def _halves_of(self, node: Node) -> tuple[Functional, Functional] | None:
        graph = node.called
        if graph is None or not graph.is_outlined or not graph.first or graph.changed:
            return None
        if graph.has_host_nodes:
            return None
        if graph not in self._halves:
            self._halves[graph] = _halves(graph)
        return self._halves[graph]

    def _call_halves(
        self, copy: Copy, node: Node, halves: tuple[Functional, Functional], used: set[Value]
    ) -> None:
        (region,) = node.regions
        known = dict(zip(region.graph.inputs, _given(copy, node), strict=True))
        wanted = [(inner, node.outputs[at])
                  for inner, at in zip(region.graph.outputs, region.outputs, strict=True)
                  if at is not None and node.outputs[at] in used]  # fmt: skip
        first, rest = halves
        self._call(copy, node, first, known)
        if not _behind(inner for inner, _ in wanted).isdisjoint(rest.outputs):
            self._call(copy, node, rest, known)
        views = Copy(known)
        for n in region.graph.nodes:
            if n.is_rematerialised:
                views.add(n)
        copy.nodes += views.nodes
        for inner, outer in wanted:
            copy.new[outer] = known.get(inner, inner)

    @staticmethod
    def _call(copy: Copy, node: Node, half: Functional, known: dict[Value, Value]) -> None:
        ins, outs = range(len(half.inputs)), range(len(half.outputs))
        outputs = [Value(v.tensor, v.version) for v in half.outputs]
        region = Region(half, tuple(ins), tuple(outs))
        inputs = [known[v] for v in half.inputs]
        copy.nodes.append(Node("op", node.op, inputs, outputs, (region,), node.part))
        known.update(zip(half.outputs, outputs, strict=True))


def _given(copy: Copy, node: Node) -> list[Value]:
    """The caller's values for the inputs of the graph that a node calls."""
    return copy.all(node.inputs[at] for at in node.regions[0].inputs if at is not None)


def _halves(graph: Functional) -> tuple[Functional, Functional]:
    """What makes the values that are wanted first, and the rest.

    The first returns what it makes that is wanted, returned, or used by the rest; the same for all
    calls.
    """
    wanted = set(graph.first)
    for node in reversed(graph.nodes):
        if not wanted.isdisjoint(node.outputs):
            wanted.update(node.inputs)
    first = [n for n in graph.nodes if not wanted.isdisjoint(n.outputs)]
    rest = [n for n in graph.nodes if wanted.isdisjoint(n.outputs)]
    made = {v for n in first for v in n.outputs if not n.is_rematerialised}
    read = _behind([*graph.first, *graph.outputs, *(v for n in rest for v in n.inputs)])
    crossing = [v for n in first for v in n.outputs if v in made and v in read]
    returned = _behind(graph.outputs)
    ends = [v for n in rest if not n.is_rematerialised for v in n.outputs if v in returned]
    return (
        _part(graph, first, crossing, graph.inputs),
        _part(graph, rest, ends, [*graph.inputs, *crossing]),
    )


def _behind(values: Iterable[Value]) -> set[Value]:
    """The values that have to be there for these to be read: views and zeros are made anew."""
    sources: set[Value] = set()
    waiting, seen = list(values), set()
    while waiting:
        v = waiting.pop()
        if v in seen:
            continue
        seen.add(v)
        if v.node is not None and v.node.is_rematerialised:
            waiting += v.node.inputs
        else:
            sources.add(v)
    return sources


def _part(
    graph: Functional, nodes: Sequence[Node], outputs: list[Value], given: Sequence[Value]
) -> Functional:
    """A graph of some of the nodes, with the views and zeros that they read."""
    own = {v for n in nodes for v in n.outputs}
    needed = [n for n in graph.nodes if n.is_rematerialised or not own.isdisjoint(n.outputs)]
    live = set(outputs)
    kept = []
    for n in reversed(needed):
        if not n.is_rematerialised or not live.isdisjoint(n.outputs):
            kept.append(n)
            live.update(n.inputs)
    inputs = [v for v in dict.fromkeys(given) if v in live]
    return replace(graph, inputs=inputs, nodes=kept[::-1], outputs=outputs, first=())
