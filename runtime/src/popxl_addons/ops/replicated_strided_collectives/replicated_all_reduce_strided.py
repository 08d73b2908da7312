"""All-reduce over strided replica groups.

XLA treats all groups alike, so these are the collectives of `replicated_all_reduce_TP` under the
names of programs that choose by group.
"""

from __future__ import annotations

import popxl
from popxl import ReplicaGrouping, Tensor
from popxl.ops.collectives.collectives import CollectiveOps
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.replicated_all_reduce_TP import replicated_all_reduce
from popxl_addons.ops.replicated_all_reduce_TP.replicated_all_reduce_TP import (
    define_identical_grad_inputs,
    define_identical_inputs,
    emit_all_reduce,
)
from popxl_addons.rts import create_mapping_graph

__all__ = [
    "replicated_all_reduce_strided",
    "replicated_all_reduce_strided_graph",
    "replicated_all_reduce_strided_identical_grad_inputs",
    "replicated_all_reduce_strided_identical_inputs",
]

_NEEDS = ("needs_patterns",)
_IDENTICAL_INPUTS = define_identical_inputs("all_reduce_strided_identical_inputs", _NEEDS)
_IDENTICAL_GRAD_INPUTS = define_identical_grad_inputs(
    "all_reduce_strided_identical_grad_inputs", _NEEDS
)


def replicated_all_reduce_strided(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """All-reduce over a (strided) group; same as `ops.collectives.replicated_all_reduce`."""
    return replicated_all_reduce(t, op, group)


def replicated_all_reduce_strided_identical_inputs(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """Identity with an all-reduce as gradient; see `replicated_all_reduce_TP`."""
    return emit_all_reduce(_IDENTICAL_INPUTS, t, op, group)


def replicated_all_reduce_strided_identical_grad_inputs(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """All-reduce with the identity as gradient; see `replicated_all_reduce_TP`."""
    return emit_all_reduce(_IDENTICAL_GRAD_INPUTS, t, op, group)


def replicated_all_reduce_strided_graph(
    tensors: NamedTensors,
    op: CollectiveOps = "add",
    group: ReplicaGrouping | None = None,
    use_io_tiles: bool = False,
) -> tuple[GraphWithNamedArgs, list[str]]:
    """Create a graph that all-reduces each of its input tensors over a replica group.

    Returns:
        The graph, with named inputs, and the names of its outputs.
    """

    def reduce(name: str, t: popxl.Tensor) -> popxl.Tensor:
        return replicated_all_reduce_strided(t, op, group)

    return create_mapping_graph(tensors, reduce, use_io_tiles)
