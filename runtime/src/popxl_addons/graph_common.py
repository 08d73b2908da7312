"""Union types of graphs with and without named inputs, and their conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import popxl
from popxl.transforms import GradGraphInfo

if TYPE_CHECKING:
    from popxl_addons.graph import BoundGraph, GraphWithNamedArgs

GraphLike = "popxl.Graph | GraphWithNamedArgs | BoundGraph"
GradGraphInfoLike = "GradGraphInfo | GraphWithNamedArgs"
CalledGraphsGradInfoLike = Mapping[Any, Any]
CalledGraphsGradInfo = Mapping[popxl.Graph, GradGraphInfo]


def as_graph(graph: popxl.Graph | GraphWithNamedArgs | BoundGraph) -> popxl.Graph:
    """Return the popxl graph of a graph with or without named inputs."""
    return graph if isinstance(graph, popxl.Graph) else graph.graph


def as_grad_graph_info(info: GradGraphInfo | GraphWithNamedArgs) -> GradGraphInfo:
    """Return `GradGraphInfo` as it is, or that of a gradient graph with named inputs."""
    return info if isinstance(info, GradGraphInfo) else info.grad_graph_info


def as_called_graphs_grad_info(
    infos: CalledGraphsGradInfoLike | None,
) -> dict[popxl.Graph, GradGraphInfo]:
    """Convert the keys to popxl graphs and the values to `GradGraphInfo`; None gives {}."""
    return {as_graph(g): as_grad_graph_info(i) for g, i in (infos or {}).items()}
