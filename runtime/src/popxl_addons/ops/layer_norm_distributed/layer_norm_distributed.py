"""Layer normalisation of features sharded over replicas."""

from __future__ import annotations

import popxl
from popxl import ReplicaGrouping, ops
from popxl_addons.utils import cast_if_needed

__all__ = ["layer_norm_distributed"]


def layer_norm_distributed(
    t: popxl.Tensor,
    w: popxl.Tensor,
    b: popxl.Tensor,
    epsilon: float = 1e-05,
    group: ReplicaGrouping | None = None,
) -> popxl.Tensor:
    """Layer-normalise features that are sharded over a replica group.

    Args:
        t: (..., features / group size): this replica's features.
        w, b: (features / group size,): scale and shift of them.
        epsilon: added to the variance.
        group: replicas that hold the features of the same samples; default: all.

    Returns:
        As `t`. Statistics are computed in float32, first the mean and then the variance, so that
        a large mean costs no precision.
    """
    group = popxl.gcg().ir.replica_grouping() if group is None else group
    features = t.shape[-1] * group.group_size
    wide = cast_if_needed(t, popxl.float32)

    def mean(x: popxl.Tensor) -> popxl.Tensor:
        part = ops.sum(x, axis=-1, keepdims=True) / features
        # The replicas go on to different results, so gradients are summed over the group too.
        return ops.collectives.replicated_all_reduce(part, "add", group)

    centred = wide - mean(wide)
    normal = centred / ops.sqrt(mean(centred * centred) + epsilon)
    scaled = normal * ops.cast(w, popxl.float32) + ops.cast(b, popxl.float32)
    return cast_if_needed(scaled, t.dtype)
