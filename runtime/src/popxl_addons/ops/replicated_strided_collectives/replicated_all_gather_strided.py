"""All-gather among replicas that are not neighbours."""

from __future__ import annotations

from popxl import ReplicaGrouping, Tensor, ops

__all__ = ["replicated_all_gather_strided"]


def replicated_all_gather_strided(t: Tensor, group: ReplicaGrouping | None = None) -> Tensor:
    """Like `ops.collectives.replicated_all_gather`: whole tensors from parts, otherwise joined
    along axis 0. XLA treats all groups alike."""
    return ops.collectives.replicated_all_gather(t, group=group)
