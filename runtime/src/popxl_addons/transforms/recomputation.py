"""Recomputation: gradient graphs that recompute activations."""

from __future__ import annotations

import popxl
from popxl import ops
from popxl._analysis.alias_analysis import owners
from popxl._analysis.effects import op_effects
from popxl._ir.op import Op
from popxl.transforms import GradGraphInfo
from popxl_addons.grad_info import Connection, fwd, fwd_grad, is_fwd, make_grad_graph_info
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.transforms.autodiff import copy_input
from popxl_addons.utils import suffix_graph_name

__all__ = ["add_recompute_inputs", "recompute_graph"]


def add_recompute_inputs(
    grad_info: GradGraphInfo,
) -> tuple[list[Connection], dict[popxl.Tensor, popxl.Tensor]]:
    """Add the inputs of a recomputing gradient graph to the current graph.

    These are, in this order: the inputs of the gradient graph that are gradients or inputs of the
    forward graph; the forward graph's other inputs, sorted by name.

    Returns:
        What they must be connected to; and the inputs, by the gradient graph's input for a gradient
        and by the forward graph's input otherwise.
    """
    connections: list[Connection] = []
    made: dict[popxl.Tensor, popxl.Tensor] = {}
    forward = grad_info.forward_graph.inputs

    def add_input(t: popxl.Tensor, connection: Connection) -> None:
        if t not in made:
            made[t] = copy_input(t)
            connections.append(connection)

    for t, expected in zip(grad_info.graph.inputs, grad_info.expected_inputs, strict=False):
        source = expected.fwd_tensor
        if not is_fwd(expected):
            add_input(t, fwd_grad(source))
        elif source in forward:
            add_input(source, fwd(source))
    for t in sorted(forward, key=lambda t: t.name):
        add_input(t, fwd(t))
    return connections, made


def _check_no_effects(graph: popxl.Graph) -> None:
    for op in graph.ops:
        if _has_effect(op):
            raise ValueError(
                f"recompute_graph: {op.name} ({op.location}) in graph {graph.id!r} has an effect "
                "outside the graph, which would happen twice: move it out of the graph, or use the "
                "gradient graph as it is, with activations"
            )


def _has_effect(op: Op) -> bool:
    """True if an op changes state outside its graph, so that running it twice does harm.

    Remote loads do not, and to print twice does no harm.
    """
    effects = op_effects(op)
    if effects.writes or effects.loads or effects.stores:
        return True
    changed = (t for i in op.modified_inputs() for t in owners(op.inputs[i]))
    return any(t._by_ref for t in changed)


def recompute_graph(grad_graph: GraphWithNamedArgs) -> GraphWithNamedArgs:
    """Create a gradient graph that first recomputes the forward graph.

    Args:
        grad_graph: a gradient graph, which takes activations as inputs.

    Returns:
        A graph with the same outputs and named arguments. Its inputs are those inputs of
        `grad_graph` that are gradients or inputs of the forward graph, in their order there; the
        other inputs of the forward graph, sorted by name; the other inputs of `grad_graph`, such
        as accumulators, sorted by name.

    Raises:
        ValueError: the forward graph has effects, which running it again would repeat: it loads or
            stores for the host, stores to remote buffers, or changes what it holds by reference.
            Printing is allowed, and happens twice.
    """
    info = grad_graph.grad_graph_info
    forward = info.forward_graph
    _check_no_effects(forward)
    with forward.ir._new_current_graph(suffix_graph_name(info.graph.name, "recomp")) as graph:
        connections, made = add_recompute_inputs(info)
        recomputed = ops.call(forward, inputs_dict={t: made[t] for t in forward.inputs})
        values = {**dict(zip(forward.outputs, recomputed, strict=True)), **made}
        inputs: dict[popxl.Tensor, popxl.Tensor] = {}
        for t, expected in zip(info.graph.inputs, info.expected_inputs, strict=False):
            inputs[t] = values[expected.fwd_tensor] if is_fwd(expected) else made[t]
        others = info.graph.inputs[len(info.expected_inputs) :]
        for t in sorted(others, key=lambda t: t.name):
            inputs[t] = copy_input(t)
        for gradient in ops.call(info.graph, inputs_dict=inputs):
            popxl.graph_output(gradient)
    args = {name: inputs[t] for name, t in grad_graph.args.to_dict().items()}
    args = {name: t for name, t in args.items() if t in graph.inputs}
    result = make_grad_graph_info(graph, forward, connections, info.expected_outputs)
    return GraphWithNamedArgs.from_grad_graph(result, type(grad_graph.args).from_dict(args))
