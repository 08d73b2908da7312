"""Running a program on paper: an Ir becomes a block of nodes, as `popxl._lower` becomes XLA's.

What `Machine` and `Frame` do with arrays while JAX traces, this does with values that have a shape
only, so that it needs neither devices nor weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from popxl._core.aliases import parents
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


class Frame:
    """Values of the tensors of one activation of a graph; compare `popxl._lower.machine.Frame`."""

    def __init__(self, tracer: Tracer, part: str) -> None:
        self.tracer, self.part = tracer, part
        self.values: dict[Tensor, Value] = {}

    def read(self, t: Tensor) -> Value:
        """The value of `t` now."""
        up = parents(t)
        if not up:
            return self.values[t] if t in self.values else self.tracer.constant(t)
        op = t._producer
        assert op is not None
        if op.inplace is not None:
            return self.read(up[0])
        found = self.tracer.expand(expansion_of(op), [self.read(p) for p in up], self.label(op))
        return found[0]

    def write(self, t: Tensor, value: Value) -> None:
        """Overwrite `t`; views write through to their owners."""
        up = parents(t)
        if not up:
            self.values[t] = value
            return
        op = t._producer
        assert op is not None
        if op.inplace is not None:
            self.write(up[0], value)
            return
        inputs = [*(self.read(p) for p in up), value]
        updated = self.tracer.expand(write_through(op, t.spec), inputs, self.label(op))
        for parent, new in zip(up, updated, strict=True):
            self.write(parent, new)

    def define(self, op: Op, results: Sequence[Value]) -> None:
        """Store the results of `op`: into the overwritten input, or as the outputs' values."""
        first = 0
        if op.inplace is not None:
            self.write(op.inputs[op.inplace], results[0])
            first = 1
        self.values.update(zip(op.outputs[first:], results[first:], strict=True))

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
