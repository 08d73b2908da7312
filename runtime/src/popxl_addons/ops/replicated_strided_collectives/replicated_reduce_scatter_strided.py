"""Reduce-scatter over strided replica groups."""

from __future__ import annotations

from popxl import ReplicaGrouping, Tensor, ops
from popxl.ops.collectives.collectives import CollectiveOps

__all__ = ["replicated_reduce_scatter_strided"]


def replicated_reduce_scatter_strided(
    t: Tensor,
    op: CollectiveOps = "add",
    group: ReplicaGrouping | None = None,
    configure_output_for_replicated_tensor_sharding: bool = False,
) -> Tensor:
    """Reduce-scatter over a (strided) group; same as `replicated_reduce_scatter`."""
    return ops.collectives.replicated_reduce_scatter(
        t, op, group, configure_output_for_replicated_tensor_sharding
    )
