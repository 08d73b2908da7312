"""Calls that are taken apart before a routine is made of the graph that makes them.

Calls of graphs that do little but move entries are written out where they stand, so that their
transfers and the segments around them are ordered together. A call of an outlined graph becomes one
of what the caller uses of it. Boundaries, which XLA merges no kernel across, keep the bits the same
at all its calls: at the values that are saved, and between the call and what surrounds it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from popxl._analysis.functionalization import Copy, Functional, Node, Value, effects_of_nodes
from popxl._analysis.memo import Deep
from popxl._ir.regions import Region
from popxl._schedule.index_arithmetic import host_rule
from popxl.ops.remote import REMOTE_LOAD, REMOTE_STORE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Flattener:
    """Takes graphs apart, each once."""

    def __init__(self) -> None:
        self._deep = Deep()
        self._inlined: dict[Functional, bool] = {}
        self._known: dict[Functional, Functional] = {}
        self._parts: dict[tuple[Functional, tuple[Value, ...]], _Part] = {}

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
            return
        if not node.is_on_host:
            _set_apart(copy, node, is_outlined_call)
        elif is_outlined_call(node):
            _set_apart(copy, node, _is_computed)
        if is_outlined_call(node) and not node.regions[0].graph.changed:
            self._call_part(copy, node, used)
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
        entries and call outlined graphs, or passes its inputs on."""
        graph = node.called
        if graph is None:
            return False
        return self._deep.once(self._inlined, graph, lambda: self._can_be_inlined(graph))

    def _can_be_inlined(self, graph: Functional) -> bool:
        if graph.is_outlined:
            return False
        if not graph.has_host_nodes:
            return not graph.changed and any(v.node is None for v in graph.outputs)
        return all(
            node.kind == "op"
            and node.op is not None
            and (
                node.op.defn in (REMOTE_LOAD, REMOTE_STORE)
                or host_rule(node.op) is not None
                or is_outlined_call(node)
                or self._is_inlined(node)
            )
            for node in graph.nodes
        )

    # ---- outlined graphs ------------------------------------------------------------------------
    def _call_part(self, copy: Copy, node: Node, used: set[Value]) -> None:
        """Add a call of what the caller uses; it makes the views that it reads."""
        (region,) = node.regions
        graph = region.graph
        wanted = {node.outputs[at]: v for v, at in zip(graph.outputs, region.outputs, strict=True)
                  if at is not None and node.outputs[at] in used}  # fmt: skip
        part, given, made = self._part(graph, tuple(wanted.values()))
        inner = Copy(dict(zip(graph.inputs, _given(copy, node), strict=True)))
        if part.nodes:
            outputs = [Value(v.tensor, v.version) for v in made]
            called = Region(part, tuple(range(len(given))), tuple(range(len(made))))
            inner.nodes.append(Node("op", node.op, inner.all(given), outputs, (called,), node.part))
            inner.new.update(zip(made, outputs, strict=True))
        for n in _needed([n for n in graph.nodes if n.is_rematerialised], wanted.values()):
            inner.add(n, node.part)
        copy.nodes += inner.nodes
        copy.new.update(zip(wanted, inner.all(wanted.values()), strict=True))

    def _part(self, graph: Functional, wanted: tuple[Value, ...]) -> _Part:
        if (graph, wanted) not in self._parts:
            self._parts[graph, wanted] = _part(graph, wanted)
        return self._parts[graph, wanted]


# ---- boundaries ---------------------------------------------------------------------------------
def is_outlined_call(node: Node | None) -> bool:
    """Whether a node calls a graph that is compiled apart."""
    graph = None if node is None else node.called
    return graph is not None and graph.is_outlined and not graph.has_host_nodes


def _is_computed(node: Node | None) -> bool:
    """Whether devices compute a node, for the segment that reads it."""
    return node is not None and not (node.is_rematerialised or node.is_on_host)


def _set_apart(copy: Copy, node: Node, is_apart: Callable[[Node | None], bool]) -> None:
    """Put boundaries behind inputs of a node whose makers are to be compiled apart."""
    for v in dict.fromkeys(node.inputs):
        if is_apart(copy.new.get(v, v).node) and v.spec.shape:
            _add_boundary(copy, v)


def _add_boundary(copy: Copy, value: Value) -> None:
    behind = Value(value.tensor, value.version)
    copy.nodes.append(Node("apart", None, copy.all([value]), [behind]))
    copy.new[value] = behind


# ---- parts of graphs ----------------------------------------------------------------------------
class _Part(NamedTuple):
    """A graph of what makes some outputs of another graph, and values of that graph.

    Attributes:
        given: those that it takes.
        made: those that it returns: outputs, or what they are views of.
    """

    graph: Functional
    given: list[Value]
    made: list[Value]


def _part(graph: Functional, outputs: Sequence[Value]) -> _Part:
    made = [v for v in _behind(outputs) if v.node is not None]
    nodes = _needed(graph.nodes, made, [n for n in graph.nodes if effects_of_nodes([n])])
    read = {*made, *(v for n in nodes for v in n.inputs)}
    given = [v for v in graph.inputs if v in read]
    copy = Copy({v: Value(v.tensor) for v in given})
    inputs, saved = copy.all(given), _behind(graph.saved)
    for n in nodes:
        copy.add(n)
        for v in n.outputs:
            if v in saved:
                _add_boundary(copy, v)
    part = replace(graph, inputs=inputs, nodes=copy.nodes, outputs=copy.all(made), saved=())
    return _Part(part, given, made)


def _needed(
    nodes: Sequence[Node], values: Iterable[Value], also: Sequence[Node] = ()
) -> list[Node]:
    """Those of the nodes that values are made by, or that `also` names, and what they need."""
    live, kept = set(values), []
    for n in reversed(nodes):
        if n in also or not live.isdisjoint(n.outputs):
            kept.append(n)
            live.update(n.inputs)
    return kept[::-1]


def _given(copy: Copy, node: Node) -> list[Value]:
    """The caller's values for the inputs of the graph that a node calls."""
    return copy.all(node.inputs[at] for at in node.regions[0].inputs if at is not None)


def _behind(values: Iterable[Value]) -> dict[Value, None]:
    """The values that have to be there for these to be read: views and zeros are made anew."""
    sources: dict[Value, None] = {}
    waiting, seen = list(values), set()
    while waiting:
        v = waiting.pop()
        if v in seen:
            continue
        seen.add(v)
        if v.node is not None and v.node.is_rematerialised:
            waiting += v.node.inputs
        else:
            sources[v] = None
    return sources
