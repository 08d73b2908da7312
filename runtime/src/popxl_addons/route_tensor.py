"""Pass a tensor of an outer graph into graphs that are already called."""

from __future__ import annotations

from typing import Any

import popxl
from popxl import Graph, Tensor

__all__ = ["is_subgraph", "route_tensor_into_graph"]


def is_subgraph(parent: Graph, subgraph: Graph) -> bool:
    """True if running `parent` can run `subgraph`, directly or through others; false for itself."""
    reachable: set[Graph] = set()
    waiting = list(parent.called_graphs)
    while waiting:
        graph = waiting.pop()
        if graph not in reachable:
            reachable.add(graph)
            waiting += graph.called_graphs
    return subgraph in reachable


def route_tensor_into_graph(
    tensor: Tensor, graph: Graph | None = None, modified: bool = False
) -> Tensor:
    """Make an outer graph's tensor an input of `graph`, through all calls in between.

    Args:
        tensor: of a graph that calls `graph`, directly or through others. A second time it comes by
            the input that is there already.
        graph: default: the current graph.
        modified: let changes made in `graph` reach `tensor`.

    Returns:
        The input of `graph` (`tensor` itself if it belongs to `graph`). Each graph between gets an
        input too, and each call passes it on.

    Raises:
        ValueError: the tensor's graph does not call `graph`, or another graph that lacks the
            tensor calls it too.
        NotImplementedError: a conditional is on the way.
    """
    graph = popxl.gcg() if graph is None else graph
    if tensor in graph:
        return tensor
    owner = tensor._graph
    if not is_subgraph(owner, graph):
        raise ValueError(f"graph {owner.id!r} of tensor {tensor.id!r} does not call {graph.id!r}")
    _check_callers(owner, graph)
    return _route_through_calls(graph, tensor, modified)


def _calling_ops(graph: Any) -> list[Any]:
    """Return the ops that call or run a graph, its call sites."""
    return list(graph._call_sites)


def _check_callers(owner: Graph, graph: Graph) -> None:
    """Raise an error unless every call of `graph` can be traced back to a call from `owner`."""
    for site in _calling_ops(graph):
        if "then" in site.attrs:
            raise NotImplementedError(
                f"cannot route a tensor through the conditional at {site.location}"
            )
        if site.graph is owner:
            continue
        if not is_subgraph(owner, site.graph):
            raise ValueError(
                f"graph {graph.id!r} is also called by {site.graph.id!r} ({site.location}), which "
                f"no call from {owner.id!r} reaches"
            )
        _check_callers(owner, site.graph)


def _route_through_calls(graph: Graph, tensor: Tensor, modified: bool) -> Tensor:
    """Add inputs for an outer tensor to `graph` and to all its callers; returns `graph`'s input."""
    if graph is tensor._graph:
        return tensor
    routed = graph._routed
    for key in ((tensor, True), (tensor, modified)):
        if key in routed:
            return routed[key]
    name = tensor.name.replace("/", "_")
    with graph:
        routed[tensor, modified] = popxl.graph_input(
            tensor.shape, tensor.dtype, name, modified, tensor.meta_shape or None
        )
    for site in _calling_ops(graph):
        site.inputs.append(_route_through_calls(site.graph, tensor, modified))
        site.graph._invalidate_analyses()
    return routed[tensor, modified]
