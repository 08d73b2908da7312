"""Calls that run only if their results are needed."""

from __future__ import annotations

import popxl
from modelling.layers import ParallelGroups, cast
from popxl import Tensor, ops
from popxl_addons import BoundGraph


def any_prompt(samples: Tensor, groups: ParallelGroups) -> Tensor:
    """Whether there is any sample in the batch of any replica, bool scalar.

    It decides whether collectives run, so it must be the same on all replicas.

    Args:
        samples: bool (batch,).
    """
    largest = ops.max(cast(samples, popxl.int32))
    if groups.data_parallel > 1:
        largest = ops.collectives.replicated_all_reduce(largest, "max", groups.dp)
    return cast(largest, popxl.bool)


def call_if(enabled: Tensor, graph: BoundGraph, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Call a graph if `enabled`; otherwise its outputs are zeros.

    XLA runs a conditional as a unit and keeps its outputs only. It schedules the ops of other calls
    freely: it puts off the last step of a layer that fills caches, and keeps that step's inputs.

    Args:
        wanted: bool scalar; the same on all replicas if the graph has collectives.
        inputs: those that are not bound.
    """
    specs = [t.spec for t in graph.graph.outputs]
    nothing = popxl.gir().create_graph(lambda: [ops.init(s.shape, s.dtype) for s in specs])
    return ops.conditional(enabled, graph.graph, nothing, inputs, then_inputs_dict=graph.args)
