"""Running a program on paper: an Ir becomes a block of nodes, as `popxl._lower` becomes XLA's.

What `Machine` and `Frame` do with arrays while JAX traces, this does with values that have a shape
only, so that it needs neither devices nor weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from popxl._core.frame import ValueFrame
from popxl.plan.primitives import Expansion, expansion_of, write_through
from popxl.plan.values import Block, Node, Value

if TYPE_CHECKING:
    from popxl._core.op import Op
    from popxl.graph import Graph
    from popxl.ir import Ir
    from popxl.tensor import Tensor


def trace(ir: Ir) -> Block:
    """The program of one replica."""
    tracer = Tracer()
    frame = Frame(tracer, "")
    frame.run_ops(ir.main_graph)
    tracer.block.outputs = [frame.read(v) for v in ir.main_graph.variables if v._remote is None]
    return tracer.block


class Tracer:
    """The block that nodes are added to."""

    def __init__(self) -> None:
        self.block = Block()
        self._constants: dict[Tensor, Value] = {}

    def add(self, node: Node) -> Node:
        self.block.nodes.append(node)
        return node

    def constant(self, t: Tensor) -> Value:
        """The value of a variable or constant, which nobody makes."""
        if t not in self._constants:
            self._constants[t] = Value(t.shape, t.dtype.itemsize)
        return self._constants[t]

    def expand(self, expansion: Expansion, inputs: Sequence[Value], part: str) -> list[Value]:
        """Add the primitives of an op."""
        values: list[Value] = list(inputs)
        for step in expansion.steps:
            reads = [values[i] for i in step.inputs if i >= 0]
            node = self.add(Node("primitive", step.name, part, reads))
            node.flops, node.arithmetic, node.facts = step.flops, step.arithmetic, step.facts
            values += [node.add_output(*out) for out in step.outputs]
        return [values[i] if i >= 0 else Value((), 4) for i in expansion.results]

    def body(self, graph: Graph, inputs: Sequence[Value], part: str) -> tuple[Block, Frame]:
        """Trace `graph` into a block of its own."""
        outer, self.block = self.block, Block()
        try:
            return self.block, self.run(graph, inputs, part)
        finally:
            outer.stored.update(dict.fromkeys(self.block.stored))  # what it holds is not known here
            self.block = outer

    def run(self, graph: Graph, inputs: Sequence[Value], part: str) -> Frame:
        """Trace `graph` into the current block."""
        frame = Frame(self, part)
        frame.values.update(zip(graph._inputs, inputs, strict=True))
        frame.run_ops(graph)
        return frame


class Frame(ValueFrame[Value]):
    """An activation on paper; compare `popxl._lower.machine.Frame`."""

    def __init__(self, tracer: Tracer, part: str) -> None:
        super().__init__()
        self.tracer, self.part = tracer, part

    def outer(self, t: Tensor) -> Value:
        return self.tracer.constant(t)

    def view(self, op: Op, inputs: Sequence[Value]) -> Value:
        return self.tracer.expand(expansion_of(op), inputs, self.label(op))[0]

    def write_through(self, op: Op, inputs: Sequence[Value], value: Value) -> list[Value]:
        expansion = write_through(op, op.outputs[0].spec)
        return self.tracer.expand(expansion, [*inputs, value], self.label(op))

    def label(self, op: Op) -> str:
        """The part that `op` belongs to: its own, or that of the call of its graph."""
        return op.part or self.part

    def node(self, kind: Any, name: str, op: Op, inputs: Sequence[Value], **facts: Any) -> Node:
        """Add a node for `op`."""
        return self.tracer.add(Node(kind, name, self.label(op), list(inputs), facts=facts))

    def run_ops(self, graph: Graph) -> None:
        """Run the ops of `graph` in order."""
        from popxl.plan.structure import structural

        for op in graph._ops:
            if op.view:
                continue
            self.tracer.block.ops[self.label(op), op.defn.name] += 1
            if op.defn.execute is None and "collective" not in op.defn.tags:
                inputs = [self.read(t) for t in op.inputs]
                self.define(op, self.tracer.expand(expansion_of(op), inputs, self.label(op)))
            else:
                structural(self, op)
