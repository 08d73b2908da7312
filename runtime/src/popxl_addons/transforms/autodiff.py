"""Gradient graphs of graphs with named inputs, and gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

import popxl
from popxl import ops
from popxl.transforms import GradGraphInfo
from popxl_addons.dot_tree import sanitise
from popxl_addons.grad_info import make_grad_graph_info
from popxl_addons.graph import GraphWithNamedArgs, names_of
from popxl_addons.graph_common import CalledGraphsGradInfoLike
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import cast_if_needed, suffix_graph_name
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory

__all__ = ["autodiff", "autodiff_with_accumulation"]

_COUNTER = "mean_accum_counter"


def autodiff(
    graph: GraphWithNamedArgs | popxl.Graph,
    grads_provided: Iterable[popxl.Tensor] | None = None,
    grads_required: Iterable[popxl.Tensor] | None = None,
    called_graphs_grad_info: CalledGraphsGradInfoLike | None = None,
) -> GraphWithNamedArgs:
    """Create the gradient graph of `graph`; see `popxl.transforms.autodiff`.

    Returns:
        The gradient graph; its `grad_graph_info` says what it expects and returns.
    """
    named = graph if isinstance(graph, GraphWithNamedArgs) else GraphWithNamedArgs(graph)
    return named.autodiff(grads_provided, grads_required, called_graphs_grad_info, force=True)


def autodiff_with_accumulation(
    graph: GraphWithNamedArgs,
    tensors_to_accumulate_grads: Iterable[popxl.Tensor],
    grads_provided: Iterable[popxl.Tensor] | None = None,
    grads_required: Iterable[popxl.Tensor] | None = None,
    called_graphs_grad_info: CalledGraphsGradInfoLike | None = None,
    replica_groupings: NamedReplicaGrouping | None = None,
    mean: bool = True,
    accumulator_dtype: popxl.dtype | None = None,
    adds: bool = True,
) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
    """Create a gradient graph that adds some of the gradients to accumulator variables.

    The accumulators are by-reference inputs. Each holds the mean over the calls since it was zero
    together with the counter, whose value is the number of calls; or the sum; or the maximum, where
    gradients are observed maxima (see `popxl.transforms.tensors_with_max_gradient`).

    Args:
        graph: the forward graph.
        tensors_to_accumulate_grads: inputs of `graph` whose gradients are accumulated instead of
            returned.
        grads_provided: outputs of `graph` whose gradients are given; default: all.
        grads_required: inputs of `graph` whose gradients are returned; default: none. Those that
            are accumulated are not returned.
        called_graphs_grad_info: gradients for graphs that `graph` calls.
        replica_groupings: groupings of the accumulators, by the names of `graph.args`.
        mean: accumulate means. Sums need no counter, and are cheaper where gradients are sparse:
            that of a table adds the rows that were looked up, where a mean changes all of them.
        accumulator_dtype: element type of the accumulators; default: that of the tensor. Sums of
            many gradients in half precision lose bits: float32 keeps them.
        adds: whether sums are added to. False, for accumulators that are zero: they become the
            gradients, of one call.

    Returns:
        Factories of the accumulators: zeros `accum.<name>` of the shape and type of the tensor
        called `name` in `graph.args`, and for means the float32 scalar `mean_accum_counter`; and
        the graph, whose arguments have these names.
    """
    accumulated = list(tensors_to_accumulate_grads)
    required = [t for t in grads_required or () if t not in accumulated]
    with popxl.transforms.accumulate_weight_gradients_in(accumulator_dtype if adds else None):
        grad = autodiff(graph, grads_provided, [*required, *accumulated], called_graphs_grad_info)
    names = _accumulator_names(graph, accumulated)
    factories = _accumulator_factories(names, replica_groupings, accumulator_dtype)
    if mean:
        factories.insert(_COUNTER, VariableFactory(0.0, popxl.float32, _COUNTER, by_ref=True))
    update = ops.var_updates.accumulate_ if adds else _copy_into_variable
    return factories, _accumulating_graph(grad, names, factories, update)


def _copy_into_variable(t: popxl.Tensor, x: popxl.Tensor) -> popxl.Tensor:
    return ops.var_updates.copy_var_update_(t, cast_if_needed(x, t.dtype))


def _accumulator_names(
    graph: GraphWithNamedArgs, accumulated: Sequence[popxl.Tensor]
) -> dict[popxl.Tensor, str]:
    """Map each tensor whose gradient accumulates to its accumulator's name, without `accum.`."""
    named = names_of(graph.args)
    return {t: named.get(t) or ".".join(map(sanitise, t.name.split("/"))) for t in accumulated}


def _accumulator_factories(
    names: Mapping[popxl.Tensor, str],
    replica_groupings: NamedReplicaGrouping | None,
    dtype: popxl.dtype | None,
) -> NamedVariableFactories:
    """Create the variable factories of gradient accumulators."""
    groups = {} if replica_groupings is None else replica_groupings.to_dict()
    factories = NamedVariableFactories()
    for t, name in names.items():
        kept = t.dtype if dtype is None else dtype
        factory = VariableFactory(
            np.broadcast_to(np.zeros((), kept.as_numpy()), t.shape),
            kept,
            f"accum.{name}",
            by_ref=True,
            replica_grouping=groups.get(name, groups.get(f"accum.{name}")),
        )
        factories.insert(f"accum.{name}", factory, overwrite=True)
    return factories


def _accumulating_graph(
    grad: GraphWithNamedArgs,
    names: Mapping[popxl.Tensor, str],
    factories: NamedVariableFactories,
    update: Callable[[popxl.Tensor, popxl.Tensor], popxl.Tensor],
) -> GraphWithNamedArgs:
    """Create a graph that runs `grad` and adds its outputs to accumulators, or returns them.

    `update` adds to a sum.
    """
    info = grad.grad_graph_info
    with info.graph.ir._new_current_graph(
        suffix_graph_name(info.graph.name, "accumulate")
    ) as graph:
        inputs = copy_inputs(info.graph)
        args = NamedTensors.from_dict(
            {name: f.create_input() for name, f in factories.to_dict().items()}
        )
        into = {t: args.get(f"accum.{name}") for t, name in names.items()}
        counter = args.to_dict().get(_COUNTER)
        outputs = ops.call(info.graph, *inputs)
        observed = popxl.transforms.tensors_with_max_gradient(info.forward_graph)
        returned = []
        for connection, gradient in zip(info.expected_outputs, outputs, strict=True):
            source = connection.fwd_tensor
            if source in into and source in observed:
                ops.var_updates.accumulate_maximum_(into[source], gradient)
            elif source in into and counter is not None:
                ops.var_updates.accumulate_mean_(into[source], gradient, counter)
            elif source in into:
                update(into[source], gradient)
            else:
                popxl.graph_output(gradient)
                returned.append(connection)
        if counter is not None:
            ops.var_updates.accumulate_(counter, popxl.constant(1, popxl.float32))
    kept = grad.args.remap(dict(zip(info.graph.inputs, inputs, strict=True)))
    args.update(kept)
    made = make_grad_graph_info(graph, info.forward_graph, info.expected_inputs, returned)
    return GraphWithNamedArgs.from_grad_graph(made, args)


def copy_inputs(graph: popxl.Graph) -> list[popxl.Tensor]:
    """Add inputs like those of `graph` to the current graph."""
    return [copy_input(t) for t in graph.inputs]


def copy_input(t: popxl.Tensor) -> popxl.Tensor:
    """Add an input like the input `t` of another graph to the current graph."""
    return popxl.graph_input(t.shape, t.dtype, t.name, t._by_ref, t.meta_shape)


def remap_grad_info(
    grad_info: GradGraphInfo, forward_graph: popxl.Graph, backward_graph: popxl.Graph
) -> GradGraphInfo:
    """Adapt `GradGraphInfo` to copies of both graphs, whose tensors have the same names."""

    def remap_connections(connections: Iterable[popxl.transforms.ExpectedConnection]) -> list:
        return [(forward_graph.get_tensor(c.fwd_tensor.name), c.connection_type)
                for c in connections]  # fmt: skip

    return make_grad_graph_info(
        backward_graph,
        forward_graph,
        remap_connections(grad_info.expected_inputs),
        remap_connections(grad_info.expected_outputs),
    )
