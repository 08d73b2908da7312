"""Conditional calls: a graph is skipped at run time if its results are not needed."""

from __future__ import annotations

import popxl
from modelling.layers import ParallelGroups, cast_if_needed
from popxl import Tensor, ops
from popxl_addons import BoundGraph


def any_across_replicas(mask: Tensor, groups: ParallelGroups) -> Tensor:
    """True on all replicas if any replica's mask has a true element: bool (batch,) -> bool scalar.

    The flag decides whether collectives run, so all replicas get the same one.
    """
    largest = ops.max(cast_if_needed(mask, popxl.int32))
    if groups.data_parallel > 1:
        largest = ops.collectives.replicated_all_reduce(largest, "max", groups.dp)
    return cast_if_needed(largest, popxl.bool)


def call_graph_if(enabled: Tensor, graph: BoundGraph, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Call a graph if `enabled`; otherwise return zeros in the shapes of its outputs.

    XLA runs a conditional as a unit and keeps only its outputs. It schedules the ops of other calls
    freely: it delays the last step of a layer that fills caches, and keeps that step's inputs.

    Args:
        enabled: bool scalar, equal on all replicas if the graph has collectives.
        inputs: the graph's inputs that are not bound.
    """
    specs = [t.spec for t in graph.graph.outputs]
    zeros = popxl.gir().create_graph(lambda: [ops.init(s.shape, s.dtype) for s in specs])
    return ops.conditional(enabled, graph.graph, zeros, inputs, then_inputs_dict=graph.args)
