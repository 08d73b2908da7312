"""All-gather over strided replica groups."""

from __future__ import annotations

from popxl import ReplicaGrouping, Tensor, ops

__all__ = ["replicated_all_gather_strided"]


def replicated_all_gather_strided(t: Tensor, group: ReplicaGrouping | None = None) -> Tensor:
    """All-gather over a (strided) group; same as `ops.collectives.replicated_all_gather`.

    Full tensors from shards, other tensors concatenated along axis 0. XLA treats all groups
    equally.
    """
    return ops.collectives.replicated_all_gather(t, group=group)
