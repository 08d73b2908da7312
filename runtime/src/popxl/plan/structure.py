"""Nodes of ops that are no JAX functions: transfers, collectives, calls, loops and branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from popxl.plan.primitives import expansion_of
from popxl.plan.values import Node, Value

if TYPE_CHECKING:
    from popxl._core.op import Op
    from popxl.plan.trace import Frame


def structural(frame: Frame, op: Op) -> None:
    """Add the nodes of `op` and what it runs."""
    rule = _RULES.get(op.defn.name)
    if rule is None:
        rule = _collective if "collective" in op.defn.tags else _effect
    rule(frame, op)


def _outputs(node: Node, op: Op) -> list[Value]:
    return [node.add_output(t.shape, t.dtype.itemsize) for t in op.outputs]


# ---- transfers ----------------------------------------------------------------------------------
def _remote_load(frame: Frame, op: Op) -> None:
    inputs, buffer = op.inputs[op.inplace is not None :], op.attrs["buffer"]
    reads = [frame.read(t) for t in inputs]
    stored = frame.tracer.block.stored.get(buffer)
    node = frame.node("load", "remote", op, reads, buffer=buffer)
    node.inputs += [] if stored is None else [stored]
    frame.define(op, _outputs(node, op))


def _remote_store(frame: Frame, op: Op) -> None:
    inputs = [frame.read(t) for t in op.inputs]
    frame.node("store", "remote", op, inputs, buffer=op.attrs["buffer"])
    if op.attrs["buffer"].entries == 1:
        frame.tracer.block.stored[op.attrs["buffer"]] = inputs[0]


def _host_load(frame: Frame, op: Op) -> None:
    whole = op.graph.ir.num_host_transfers == 1  # a run loads all of the stream
    node = frame.node("load", "host", op, [], stream=op.attrs["stream"], whole=whole)
    frame.define(op, _outputs(node, op))


def _host_store(frame: Frame, op: Op) -> None:
    frame.node("store", "host", op, [frame.read(op.inputs[0])], stream=op.attrs["stream"])


def _collective(frame: Frame, op: Op) -> None:
    inputs = [frame.read(t) for t in op.inputs]
    kinds = op.defn.tags - {"collective"}
    group = op.attrs.get("group")
    moves = "slice" not in kinds and group is not None and group.group_size > 1
    if not moves:  # each replica by itself
        frame.define(op, frame.tracer.expand(expansion_of(op), inputs, frame.label(op)))
        return
    node = frame.node("collective", next(iter(sorted(kinds))), op, inputs, group=group)
    frame.define(op, _outputs(node, op))


def _effect(frame: Frame, op: Op) -> None:
    """An op that is only known to do something, such as printing or loading code."""
    node = frame.node("effect", op.defn.name, op, [frame.read(t) for t in op.inputs])
    frame.define(op, _outputs(node, op))


# ---- calls, loops, branches ---------------------------------------------------------------------
def _call(frame: Frame, op: Op) -> None:
    graph = op.attrs["graph"]
    inner = frame.tracer.run(graph, [frame.read(t) for t in op.inputs], frame.label(op))
    frame.values.update(zip(op.outputs, map(inner.read, graph._outputs), strict=True))
    for i in op.modified_inputs():
        frame.write(op.inputs[i], inner.read(graph._inputs[i]))


def _repeat(frame: Frame, op: Op) -> None:
    """A loop that carries what it changes; compare `popxl.ops.repeat`."""
    graph, count, carried = op.attrs["graph"], op.attrs["count"], op.attrs["carried"]
    changed = sorted(i for i in op.modified_inputs() if i >= carried)
    start = [frame.read(t) for t in op.inputs]
    moving = [*range(carried), *changed]
    inside = list(start)
    for i in moving:
        inside[i] = Value(start[i].shape, start[i].itemsize)
    body, inner = frame.tracer.body(graph, inside, frame.label(op))
    outs = [inner.read(t) for t in graph._outputs[:carried]]
    body.outputs = [*outs, *(inner.read(graph._inputs[i]) for i in changed)]
    node = frame.node("loop", "repeat", op, [start[i] for i in moving])
    node.bodies, node.count, node.carried = (body,), count, tuple(inside[i] for i in moving)
    results = [node.add_output(v.shape, v.itemsize) for v in node.inputs]
    extra = [node.add_output(t.shape, t.dtype.itemsize) for t in graph._outputs[carried:]]
    frame.values.update(zip(op.outputs, [*results[:carried], *extra], strict=True))
    for i, value in zip(moving, results, strict=True):
        if i >= carried or i in op.modified_inputs():
            frame.write(op.inputs[i], value)


def _conditional(frame: Frame, op: Op) -> None:
    condition, *values = [frame.read(t) for t in op.inputs]
    then, otherwise = op.attrs["then"], op.attrs["otherwise"]
    split = len(then._inputs)
    changed = list(dict.fromkeys(op.inputs[i] for i in sorted(op.modified_inputs())))
    bodies = []
    for graph, first in ((then, 0), (otherwise, split)):
        inputs = values[first : first + len(graph._inputs)]
        body, inner = frame.tracer.body(graph, inputs, frame.label(op))
        new = {t: frame.read(t) for t in changed}
        for i, t in enumerate(graph._inputs):
            if 1 + first + i in op.modified_inputs():
                new[op.inputs[1 + first + i]] = inner.read(t)
        body.outputs = [*(inner.read(t) for t in graph._outputs), *new.values()]
        bodies.append(body)
    node = frame.node("branch", "conditional", op, [condition])
    node.bodies = tuple(bodies)
    frame.values.update(zip(op.outputs, _outputs(node, op), strict=True))
    for t in changed:
        frame.write(t, node.add_output(t.shape, t.dtype.itemsize))


def _gradient_of_loop(frame: Frame, op: Op) -> None:
    """The loop again, keeping what the gradients need, and their graph for each iteration; compare
    `popxl.transforms.flow`."""
    forward, backward = op.attrs["forward"], op.attrs["backward"]
    count, carried, feed = op.attrs["count"], op.attrs["carried"], op.attrs["feed"]
    inputs = [frame.read(t) for t in op.inputs]
    start = inputs[: len(forward._inputs)]
    constant = dict(zip(forward._inputs[carried:], start[carried:], strict=False))
    firsts = [Value(v.shape, v.itemsize) for v in start[:carried]]
    again, inner = frame.tracer.body(forward, [*firsts, *start[carried:]], frame.label(op))
    kept = [t for t in feed if not isinstance(t, int) and t not in constant]
    again.outputs = [inner.read(t) for t in (*forward._outputs[:carried], *kept)]
    first = frame.node("loop", "repeat_grad", op, inputs)
    first.bodies, first.count = (again,), count
    saved = [first.add_output((count, *t.shape), t.dtype.itemsize) for t in kept]
    fed = [
        constant[source] if source in constant else Value(t.shape, t.dtype.itemsize)
        for source, t in zip(feed, backward._inputs, strict=True)
    ]
    body, reached = frame.tracer.body(backward, fed, frame.label(op))
    body.outputs = [reached.read(t) for t in backward._outputs]
    node = frame.node("loop", "repeat_grad", op, [*inputs, *saved])
    node.bodies, node.count = (body,), count
    frame.define(op, _outputs(node, op))


def _gradient_of_branch(frame: Frame, op: Op) -> None:
    """Either branch again, and its gradient graph."""
    inputs = [frame.read(t) for t in op.inputs]
    bodies, first = [], 1
    for graph, backward, feed in zip(
        op.attrs["branches"], op.attrs["backward"], op.attrs["feed"], strict=True
    ):
        values = inputs[first : first + len(graph._inputs)]
        first += len(graph._inputs)
        body, inner = frame.tracer.body(graph, values, frame.label(op))
        if backward is not None:
            fed = [
                Value(t.shape, t.dtype.itemsize) if isinstance(source, int) else inner.read(source)
                for source, t in zip(feed, backward._inputs, strict=True)
            ]
            more, reached = frame.tracer.body(backward, fed, frame.label(op))
            body.nodes += more.nodes
            body.ops += more.ops
            body.outputs = [reached.read(t) for t in backward._outputs]
        bodies.append(body)
    node = frame.node("branch", "conditional_grad", op, inputs)
    node.bodies = tuple(bodies)
    frame.define(op, _outputs(node, op))


_RULES: dict[str, Callable[[Frame, Op], None]] = {
    "remote_load": _remote_load,
    "remote_store": _remote_store,
    "host_load": _host_load,
    "host_store": _host_store,
    "call": _call,
    "repeat": _repeat,
    "conditional": _conditional,
    "repeat_grad": _gradient_of_loop,
    "conditional_grad": _gradient_of_branch,
}
