"""Functionalization: converts a graph to pure SSA form, which is scheduled, compiled and planned.

Programs mutate tensors: in-place ops, views that write through to their owners, inputs by
reference. In the functional form, a tensor that owns its storage has one `Value` for each state,
bound once; a mutation makes the next value. Inputs that a graph changes become further outputs, one
for each owner. Reading a view is a node that computes it from its owners; writing to a view is a
node that makes new owners. Both branches of a conditional return the same owners, and a branch that
does not change an owner returns its input. A loop carries the owners that its body changes.

In this form, order is data flow, and two values share memory only if they are one value.
`print(graph.functional)` shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from popxl._analysis.effects import Effects, combine_effects
from popxl._analysis.memo import graph_cached, graph_cached_property
from popxl._analysis.view_merging import MergedViews
from popxl._ir.analysis_registry import analyses
from popxl._ir.regions import Region, regions

if TYPE_CHECKING:
    from popxl._ir.op import Op
    from popxl.graph import Graph
    from popxl.streams import Stream
    from popxl.tensor import Tensor, TensorSpec


class Value:
    """The value of a tensor at one point of a program (SSA).

    Attributes:
        tensor: an owner of storage, or a view that is read or written here.
        version: number of earlier values of the tensor.
        node: the node that defines the value; None for graph inputs and constants.
    """

    __slots__ = ("node", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int = 0) -> None:
        self.tensor, self.version = tensor, version
        self.node: Node | None = None

    @property
    def spec(self) -> TensorSpec:
        return self.tensor.spec

    def __repr__(self) -> str:
        from popxl._analysis.tensor_names import short_name

        return f"%{short_name(self.tensor)}" + (f"'{self.version}" if self.version else "")


class Node:
    """An op in a functional graph, with SSA values as inputs and outputs.

    Attributes:
        kind: "op": an op; "view": what a view shows of its inputs; "write": the inputs of a view
            (first) after a value (last) was written to it; "zeros"; "barrier": the same value,
            which XLA merges no kernel across.
        op: the op of the program; None for zeros and barriers without an op.
        inputs, outputs: its values.
        regions: graphs that the node runs.
        part: label in plans; "": that of what runs the graph.
    """

    __slots__ = ("inputs", "kind", "op", "outputs", "part", "regions")

    def __init__(
        self,
        kind: Literal["op", "view", "write", "zeros", "barrier"],
        op: Op | None,
        inputs: Iterable[Value],
        outputs: Iterable[Value],
        regions: tuple[Region[FunctionalGraph], ...] = (),
        part: str | None = None,
    ) -> None:
        self.kind, self.op, self.regions = kind, op, regions
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.part = part if part is not None else "" if op is None else op.part
        for value in self.outputs:
            value.node = self

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Attributes of the op that the node represents."""
        return {} if self.op is None else self.op.attrs

    @property
    def callee(self) -> FunctionalGraph | None:
        """The functional graph that the node calls; None if it is not a call."""
        match self.regions:
            case (region,) if region.count == 1 and region.kind == "always":
                return region.graph
        return None

    @property
    def is_rematerialized(self) -> bool:
        """True if the node is recomputed at each use, instead of computed once."""
        return self.kind in ("view", "zeros", "barrier")

    @property
    def is_on_host(self) -> bool:
        """True if the host executes the node, or executes some nodes of the graphs that it runs.

        That is a load or store of a remote buffer, a graph that holds such a node, or a call of an
        outlined graph.
        """
        if self.op is not None and "host" in self.op.defn.tags:
            return True
        graphs = (region.graph for region in self.regions if region.kind != "derivative")
        return any(graph.is_outlined or graph.has_host_nodes for graph in graphs)

    def __str__(self) -> str:
        return analyses.format_node(self)


@dataclass(eq=False)
class FunctionalGraph:
    """Pure (SSA) form of a graph: in-place ops, views and references are replaced by values.

    Attributes:
        graph: the graph.
        inputs: values of its inputs; of the main graph's: of the variables on the device.
        nodes: in program order.
        outputs: values of its outputs, then those of the inputs that it changes at its end.
        changed: these inputs.
        is_outlined: it is compiled separately.
        saved: values of the tensors in `OutlineInfo.saved`.
        is_branch: it is a branch, with further owners of the caller as inputs and outputs.
    """

    graph: Graph
    inputs: list[Value]
    nodes: list[Node]
    outputs: list[Value]
    changed: tuple[int, ...] = ()
    is_outlined: bool = False
    saved: tuple[Value, ...] = ()
    is_branch: bool = False

    @graph_cached_property
    def effects(self) -> Effects:
        """State that one execution of the graph reads and writes, in called graphs too."""
        return effects_of_nodes(self.nodes)

    @graph_cached_property
    def has_host_nodes(self) -> bool:
        """True if the host executes at least one node of the graph."""
        return any(node.is_on_host for node in self.nodes)

    @graph_cached_property
    def num_stochastic_roundings(self) -> int:
        """Number of variable updates rounded stochastically in one execution of the graph."""
        return sum(map(count_stochastic_roundings, self.nodes))

    @graph_cached_property
    def transfer_counts(self) -> Counter[Stream]:
        """Number of transfers on each host stream in one execution; the larger branch counts."""
        total: Counter[Stream] = Counter()
        for node in self.nodes:
            if node.kind == "op" and "stream" in node.attrs:
                total[node.attrs["stream"]] += 1
            branches: Counter[Stream] = Counter()
            for region in node.regions:
                inner = region.graph.transfer_counts
                if region.kind == "branch":
                    branches |= inner
                else:
                    total.update({stream: n * region.count for stream, n in inner.items()})
            total += branches
        return total

    @cached_property
    def used_values(self) -> set[Value]:
        """Values that the graph's nodes read or that it returns."""
        return {*self.outputs, *(v for node in self.nodes for v in node.inputs)}

    def with_zero_inputs(self, input_indices: Sequence[int]) -> FunctionalGraph:
        """Returns the functional graph with some inputs replaced by zeros."""
        given = [Value(v.tensor) for v in self.inputs]
        copy = NodeCopier(dict(zip(self.inputs, given, strict=True)))
        copy.nodes += [Node("zeros", None, (), [given[i]]) for i in input_indices]
        for node in self.nodes:
            copy.add(node)
        inputs = [v for i, v in enumerate(given) if i not in input_indices]
        return replace(self, inputs=inputs, nodes=copy.nodes, outputs=copy.map_values(self.outputs))

    def __str__(self) -> str:
        return analyses.format_functional_graph(self)


class NodeCopier:
    """Copies functional nodes into another graph, with the copied values as their inputs.

    Attributes:
        mapping: copies of values; values without one, such as constants, stay.
        nodes: the copies.
    """

    def __init__(self, new: dict[Value, Value]) -> None:
        self.mapping = new
        self.nodes: list[Node] = []

    def map_values(self, values: Iterable[Value]) -> list[Value]:
        """Returns the copies of values; values without a copy, such as constants, stay."""
        return [self.mapping.get(v, v) for v in values]

    def add(self, node: Node, part: str = "") -> None:
        """Copies a node into the graph; `part` is the region label if the node has none."""
        outputs = [Value(v.tensor, v.version) for v in node.outputs]
        inputs, label = self.map_values(node.inputs), node.part or part
        self.nodes.append(Node(node.kind, node.op, inputs, outputs, node.regions, label))
        self.mapping.update(zip(node.outputs, outputs, strict=True))


# ---- what nodes do ------------------------------------------------------------------------------
def effects_of_nodes(nodes: Iterable[Node]) -> Effects:
    """Returns the state that nodes read and write, in the graphs that they run too."""
    ops = ((node.op, node.regions) for node in nodes if node.op is not None and node.kind == "op")
    return combine_effects(ops, lambda graph: graph.effects)


def count_stochastic_roundings(node: Node) -> int:
    """Returns the number of variable updates that one execution of a node rounds stochastically.

    Loops count times their iterations; of branches, the larger number counts.
    """
    if node.op is None or node.kind != "op":
        return 0
    if node.op.can_round_stochastically:
        return 1
    branches = [r.graph.num_stochastic_roundings for r in node.regions if r.kind == "branch"]
    always = sum(
        r.count * r.graph.num_stochastic_roundings for r in node.regions if r.kind != "branch"
    )
    return always + max(branches, default=0)


# ---- the pass -----------------------------------------------------------------------------------
@graph_cached
def functionalize(graph: Graph, *extra_tensors: Tensor) -> FunctionalGraph:
    """Returns the functional (SSA) form of `graph`; the main graph's inputs are its variables.

    Args:
        extra_tensors: tensors whose values at the end follow the graph's outputs.
    """
    return _FunctionalizePass(graph).run(extra_tensors)


class _GraphWriter:
    """Functional graph under construction, with the SSA value of each tensor that owns storage."""

    def __init__(self, current: dict[Tensor, Value], views: MergedViews) -> None:
        """Start from the `current` values of storage owners; `views` is the alias analysis."""
        self.nodes: list[Node] = []
        self.current, self.views = current, views
        self._view_values: dict[tuple[Tensor, tuple[Value, ...]], Value] = {}
        self._versions: dict[Tensor, int] = {}

    def new_value(self, t: Tensor) -> Value:
        """Returns a new SSA value, the next version of tensor `t`."""
        t = self.views.inplace_root(t)
        self._versions[t] = self._versions.get(t, -1 if t._producer else 0) + 1
        return Value(t, self._versions[t])

    def add_node(self, *args: object) -> Node:
        node = Node(*args)  # type: ignore[arg-type]
        self.nodes.append(node)
        return node

    def read_tensor(self, t: Tensor) -> Value:
        """Returns the current SSA value of `t`; adds view nodes where `t` is a view."""
        t = self.views.inplace_root(t)
        values: dict[Tensor, Value] = {}
        for part in self.views.views_and_owners(t):
            parents = tuple(values[p] for p in self.views.view_parents(part))
            if not parents:
                values[part] = self.current.setdefault(part, Value(part))
                continue
            if (part, parents) not in self._view_values:
                self._view_values[part, parents] = self.new_value(part)
                inputs = (*parents, *self._element_indices(part))
                self.add_node(
                    "view", self.views.view_op(part), inputs, [self._view_values[part, parents]]
                )
            values[part] = self._view_values[part, parents]
        return values[t]

    def _element_indices(self, t: Tensor) -> list[Value]:
        """Returns [constant of element indices] for a view that gathers elements, else []."""
        return [Value(self.views.elements[t])] if t in self.views.elements else []

    def write_tensor(self, t: Tensor, value: Value) -> None:
        """Sets the SSA value of `t`; if it is a view, also of the tensors that it reads."""
        worklist = [(self.views.inplace_root(t), value)]
        while worklist:
            t, value = worklist.pop()
            parents = self.views.view_parents(t)
            if not parents:
                self.current[t] = value
                continue
            inputs = [*map(self.read_tensor, parents), *self._element_indices(t)]
            node = self.add_node(
                "write", self.views.view_op(t), [*inputs, value], map(self.new_value, parents)
            )
            worklist += reversed(list(zip(parents, node.outputs, strict=True)))


class _FunctionalizePass(_GraphWriter):
    """Builds the functional (SSA) form of one graph."""

    def __init__(self, graph: Graph) -> None:
        super().__init__({}, MergedViews())
        self._graph = graph

    def run(self, extra_tensors: Sequence[Tensor]) -> FunctionalGraph:
        """Converts all ops of the graph to functional nodes."""
        graph = self._graph
        is_main = graph is graph.ir.main_graph
        inputs = [Value(t) for t in (graph._device_tensors if is_main else graph._inputs)]
        self.current.update((v.tensor, v) for v in inputs)
        for op in graph._ops:
            self.views.add(op) if op.view else self._functionalize_op(op)
        outputs = [self.read_tensor(t) for t in (*graph._outputs, *extra_tensors)]
        last = [self.current[v.tensor] for v in inputs]
        changed = tuple(i for i, (a, b) in enumerate(zip(inputs, last, strict=True)) if a is not b)
        outputs += [last[i] for i in changed]
        form = FunctionalGraph(graph, inputs, self.nodes, outputs, changed)
        if graph._outlined is not None:
            form.is_outlined, form.saved = True, tuple(map(self.read_tensor, graph._outlined.saved))
        return form

    # ---- ops ------------------------------------------------------------------------------------
    def _functionalize_op(self, op: Op) -> None:
        op_regions = regions(op)
        if any(region.kind == "branch" for region in op_regions):
            self._functionalize_branches(op, op_regions)
        elif any(region.kind == "always" for region in op_regions):
            (region,) = op_regions
            self._functionalize_loop(op, region)
        elif op.inplace is None and op.defn.is_identity is not None and op.defn.is_identity(op):
            self.current[op.outputs[0]] = self.read_tensor(op.inputs[0])
        elif "zeros" in op.defn.tags:
            self._functionalize_zeros(op.outputs[0], op)
        else:
            self._functionalize_plain_op(op, op_regions)

    def _functionalize_zeros(self, t: Tensor, op: Op | None = None) -> None:
        (self.current[t],) = self.add_node("zeros", op, (), [self.new_value(t)]).outputs

    def _functionalize_plain_op(self, op: Op, op_regions: Sequence[Region[Graph]]) -> None:
        inputs = [self.read_tensor(t) for t in op.inputs]
        derived = tuple(self._functionalize_derivative(region) for region in op_regions)
        node = self.add_node("op", op, inputs, map(self.new_value, op.outputs), derived)
        first = 0 if op.inplace is None else 1
        if first:
            self.write_tensor(op.outputs[0], node.outputs[0])
        self.current.update(zip(op.outputs[first:], node.outputs[first:], strict=True))

    def _functionalize_derivative(self, region: Region[Graph]) -> Region[FunctionalGraph]:
        form = functionalize(region.graph, *region.extra_tensors)
        return Region(
            form, region.inputs, (None,) * len(form.outputs), (), region.count, "derivative"
        )

    # ---- loops, of which calls are one of one iteration -----------------------------------------
    def _functionalize_loop(self, op: Op, region: Region[Graph]) -> None:
        form = functionalize(region.graph)
        if region.count == 0:
            self._functionalize_empty_loop(op, region)
            return
        inputs = [self.read_tensor(t) for t in op.inputs]
        num_outputs = len(region.outputs)
        reaching = [
            (num_outputs + k, i) for k, i in enumerate(form.changed) if region.writes_back(op, i)
        ]
        carried = {i: k for k, i in region.carried}
        by_ref = [(k, i) for k, i in reaching if i not in carried]
        results = [*op.outputs, *(op.inputs[region.op_input_index(i)] for _, i in by_ref)]
        position = {k: len(op.outputs) + n for n, (k, _) in enumerate(by_ref)}
        pure = Region(
            form,
            region.inputs,
            (*region.outputs, *(position.get(k) for k in range(num_outputs, len(form.outputs)))),
            (*region.carried, *by_ref),
            region.count,
        )
        node = self.add_node("op", op, inputs, map(self.new_value, results), (pure,))
        values = node.outputs[len(op.outputs) :]
        self.current.update(zip(op.outputs, node.outputs, strict=False))
        for (_, i), value in zip(by_ref, values, strict=True):
            self.write_tensor(op.inputs[region.op_input_index(i)], value)
        for _, i in reaching:  # a reference that is carried ends with the last iteration's output
            if i in carried:
                self.write_tensor(
                    op.inputs[region.op_input_index(i)], self.current[op.outputs[carried[i]]]
                )

    def _functionalize_empty_loop(self, op: Op, region: Region[Graph]) -> None:
        carried = dict(region.carried)
        for k, position in enumerate(region.outputs):
            if position is not None and k in carried:
                self.current[op.outputs[position]] = self.read_tensor(
                    op.inputs[region.op_input_index(carried[k])]
                )
            elif position is not None:
                self._functionalize_zeros(op.outputs[position])

    # ---- branches -------------------------------------------------------------------------------
    def _functionalize_branches(self, op: Op, op_regions: Sequence[Region[Graph]]) -> None:
        forms = [functionalize(region.graph) for region in op_regions]
        changed: dict[Tensor, None] = {}
        for region, form in zip(op_regions, forms, strict=True):
            for i in form.changed:
                if region.writes_back(op, i):
                    owned = self.views.owners(op.inputs[region.op_input_index(i)])
                    changed.update(dict.fromkeys(owned))
        owners = list(changed)
        inputs = [self.read_tensor(t) for t in (*op.inputs, *owners)]
        first, last = len(op.inputs), len(op.outputs)
        pure = [
            Region(
                self._functionalize_branch(op, region, form, owners),
                (*region.inputs, *range(first, first + len(owners))),
                (*region.outputs, *range(last, last + len(owners))),
                kind="branch",
            )
            for region, form in zip(op_regions, forms, strict=True)
        ]
        node = self.add_node(
            "op", op, inputs, map(self.new_value, (*op.outputs, *owners)), tuple(pure)
        )
        self.current.update(zip((*op.outputs, *owners), node.outputs, strict=True))

    def _functionalize_branch(
        self, op: Op, region: Region[Graph], branch_graph: FunctionalGraph, owners: Sequence[Tensor]
    ) -> FunctionalGraph:
        """Returns a branch that also takes and returns the caller's tensors that own storage."""
        given = [Value(t) for t in owners]
        writer = _GraphWriter(dict(zip(owners, given, strict=True)), self.views)
        num_outputs = len(region.outputs)
        for k, i in enumerate(branch_graph.changed):
            if region.writes_back(op, i):
                writer.write_tensor(
                    op.inputs[region.op_input_index(i)], branch_graph.outputs[num_outputs + k]
                )
        return replace(
            branch_graph,
            inputs=[*branch_graph.inputs, *given],
            nodes=[*branch_graph.nodes, *writer.nodes],
            outputs=[*branch_graph.outputs[:num_outputs], *(writer.current[t] for t in owners)],
            changed=(),
            is_branch=True,
        )
