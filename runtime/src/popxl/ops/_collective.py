"""Collectives among the replicas of a group, for use in traced JAX functions.

Replicas are one mesh axis; a ReplicaGrouping is a partition of it. There is no group-local index
in XLA, so `rank` looks the replica up in a constant table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import popdist

if TYPE_CHECKING:
    from popxl.replica_grouping import ReplicaGrouping

AXIS = "r"


def _replica_groups(group: ReplicaGrouping) -> list[list[int]]:
    return [list(g) for g in group.groups]


def psum(x: Any, group: ReplicaGrouping) -> Any:
    """Returns the sum of an array over the replicas of a group."""
    return (
        x if group.group_size == 1 else lax.psum(x, AXIS, axis_index_groups=_replica_groups(group))
    )


def pmax(x: Any, group: ReplicaGrouping) -> Any:
    """Returns the element-wise maximum of an array over the replicas of a group."""
    return (
        x if group.group_size == 1 else lax.pmax(x, AXIS, axis_index_groups=_replica_groups(group))
    )


def pmin(x: Any, group: ReplicaGrouping) -> Any:
    """Returns the element-wise minimum of an array over the replicas of a group."""
    return (
        x if group.group_size == 1 else lax.pmin(x, AXIS, axis_index_groups=_replica_groups(group))
    )


def all_gather(x: Any, group: ReplicaGrouping, axis: int = 0, tiled: bool = True) -> Any:
    """Concatenates (tiled) or stacks the replicas' arrays along `axis`, in rank order."""
    if group.group_size == 1:
        return x if tiled else jnp.expand_dims(x, axis)
    if not x.size:  # XLA refuses to gather and scatter what has no elements
        return (jnp.concatenate if tiled else jnp.stack)([x] * group.group_size, axis)
    return lax.all_gather(x, AXIS, axis=axis, tiled=tiled, axis_index_groups=_replica_groups(group))


def reduce_scatter(x: Any, group: ReplicaGrouping) -> Any:
    """Returns this replica's slice along axis 0 of the sum over the replicas of a group."""
    groups = _replica_groups(group)

    def reduce_all_at_once(x: Any) -> Any:
        return lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True, axis_index_groups=groups)

    def reduce_each_slice(x: Any) -> Any:
        slices = jnp.reshape(x, (group.group_size, -1, *x.shape[1:]))
        own = lax.all_to_all(slices, AXIS, 0, 0, axis_index_groups=groups)
        return jnp.sum(own, axis=0, dtype=x.dtype)

    if group.group_size == 1:
        return x
    if not x.size:
        return x[: x.shape[0] // group.group_size]
    if popdist.getNumInstances() > 1:
        # XLA's reduce-scatter by gloo does not wait until all of a large message is sent, and then
        # frees it: the last elements may arrive wrong (tests/popdist/test_reduce_scatter.py).
        return lax.platform_dependent(x, cpu=reduce_each_slice, default=reduce_all_at_once)
    return reduce_all_at_once(x)


def ppermute(x: Any, source_target_pairs: list[tuple[int, int]]) -> Any:
    """Sends from the first to the second replica of each pair; other replicas receive zeros."""
    return lax.ppermute(x, AXIS, source_target_pairs)


def rank(group: ReplicaGrouping) -> jax.Array:
    """Returns the index of this replica within its group, int32."""
    if group.group_size == 1:
        return jnp.int32(0)
    table = np.zeros(len(group.assignment), np.int32)
    for members in group.groups:
        table[list(members)] = np.arange(len(members))
    return jnp.asarray(table)[lax.axis_index(AXIS)]
