"""Replicated tensor sharding (RTS): each replica of a group holds one flat shard of a tensor.

`gather_...` joins the shards; `reduce_...` reduces a value that differs between replicas (a
gradient) and leaves each replica its shard of the result.

`gather_...` brings the parts together; `reduce_...` combines a value that each replica has its own
of (a gradient) and leaves each replica its part of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import popxl
from popxl import ReplicaGrouping, ops
from popxl.ops.collectives.collectives import CollectiveOps
from popxl_addons.dot_tree import DotTree
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.sharding import effective_shards, sharded_spec
from popxl_addons.utils import null_context

__all__ = [
    "all_gather_replica_sharded_graph",
    "gather_replica_sharded_tensor",
    "reduce_replica_sharded_graph",
    "reduce_replica_sharded_tensor",
    "replica_sharded_spec",
]


def replica_sharded_spec(t: popxl.Tensor, shard_over: ReplicaGrouping) -> popxl.TensorSpec:
    """Spec of one replica's shard of `t`, sharded over the groups of `shard_over`.

    Returns:
        (n / group size,) with `meta_shape` = `t.shape`; or the spec of `t` itself if it is a part
        already, or if the group size does not divide its number of elements.
    """
    if t.meta_shape:
        return popxl.TensorSpec(t.shape, t.dtype, t.meta_shape)
    return sharded_spec(t.shape, t.dtype, shard_over.group_size)


def _tile_context(use_io_tiles: bool) -> AbstractContextManager[Any]:
    return popxl.io_tiles() if use_io_tiles else null_context()


def _group_replicas_by_key(
    grouping: ReplicaGrouping, key: Callable[[int, int, int], tuple[int, ...]]
) -> ReplicaGrouping:
    """Group all replicas by `key(replica, group, rank in the group)`."""
    keys: dict[int, tuple[int, ...]] = {}
    for group, members in enumerate(grouping.groups):
        keys.update({r: key(r, group, place) for place, r in enumerate(members)})
    ordered = [keys[r] for r in sorted(keys)]
    labels = {k: i for i, k in enumerate(dict.fromkeys(ordered))}
    return popxl.gcg().ir.replica_grouping_from_assignments([labels[k] for k in ordered])


# ---- gather -------------------------------------------------------------------------------------
def gather_replica_sharded_tensor(
    t: popxl.Tensor, use_io_tiles: bool = False, replica_group: ReplicaGrouping | None = None
) -> popxl.Tensor:
    """All-gather a replica-sharded tensor; an unsharded one is returned as it is.

    Args:
        use_io_tiles: place the collective on IO tiles.
        replica_group: replicas that share the tensor; default: all. If it is cut into fewer parts
            than a group has replicas, consecutive replicas hold one copy.
    """
    if not t.meta_shape:
        return t
    with _tile_context(use_io_tiles):
        return ops.collectives.replicated_all_gather(
            t, group=replica_group, output_shape="meta_shape"
        )


def create_mapping_graph(
    tensors: DotTree[Any],
    fn: Callable[[str, popxl.Tensor], popxl.Tensor],
    use_io_tiles: bool = False,
) -> tuple[GraphWithNamedArgs, list[str]]:
    """Create a graph that applies `fn(name, t)` to each input t, optionally on IO tiles.

    Args:
        tensors: tensors, or what has their `name`, `shape`, `dtype` and `meta_shape`.

    Returns:
        The graph, with named inputs, and the names of its outputs.
    """
    names, leaves = tensors.unpack()

    def build() -> list[popxl.Tensor]:
        inputs = [
            popxl.graph_input(t.shape, t.dtype, name, meta_shape=t.meta_shape)
            for name, t in zip(names, leaves, strict=True)
        ]
        with _tile_context(use_io_tiles):
            return list(map(fn, names, inputs))

    graph = popxl.gcg().ir.create_graph(build)
    return GraphWithNamedArgs(graph, NamedTensors.pack(names, graph.inputs)), names


def all_gather_replica_sharded_graph(
    tensors: DotTree[Any],
    use_io_tiles: bool = False,
    replica_groups: NamedReplicaGrouping | None = None,
) -> tuple[GraphWithNamedArgs, list[str]]:
    """Create a graph that all-gathers sharded tensors and returns others unchanged.

    Args:
        tensors: tensors of the specs that the graph will be called with, or variable factories.
        replica_groups: for each name the replicas that share the tensor; default: all.

    Returns:
        The graph, with named inputs, and the names of its outputs.
    """
    groups = {} if replica_groups is None else replica_groups.to_dict()
    return create_mapping_graph(
        tensors,
        lambda name, t: gather_replica_sharded_tensor(t, use_io_tiles, groups.get(name)),
    )


# ---- reduce -------------------------------------------------------------------------------------
def _refines(fine: ReplicaGrouping, coarse: ReplicaGrouping) -> bool:
    """True if each replica group of `fine` lies within one group of `coarse`."""
    return all(len({coarse.assignment[r] for r in members}) == 1 for members in fine.groups)


def reduce_replica_sharded_tensor(
    t: popxl.Tensor,
    op: CollectiveOps = "add",
    replica_group: ReplicaGrouping | None = None,
    shard_group: ReplicaGrouping | None = None,
) -> popxl.Tensor:
    """Reduce `t` over the replicas of `replica_group`, and shard the result over `shard_group`.

    Args:
        op: reduction, such as "add" or "mean" (over `replica_group`).
        replica_group: replicas whose values are combined; default: all.
        shard_group: replicas over which the result is cut; default: `replica_group`. A result
            whose elements they cannot share evenly stays whole.

    Where the shard groups lie within the replica groups, each does a reduce-scatter, and the
    parts are all-reduced among the shard groups of a replica group. Otherwise (a tensor that is
    cut over more replicas than have different values of it) an all-reduce is followed by a slice.
    """
    replica_group = popxl.gcg().ir.replica_grouping() if replica_group is None else replica_group
    shard_group = replica_group if shard_group is None else shard_group
    collectives = ops.collectives
    if effective_shards(t.shape, shard_group.group_size) == 1:
        return _all_reduce(t, op, replica_group)
    if not _refines(shard_group, replica_group):
        return collectives.replica_sharded_slice(_all_reduce(t, op, replica_group), shard_group)
    part = collectives.replicated_reduce_scatter(
        t, op, shard_group, configure_output_for_replicated_tensor_sharding=True
    )
    if shard_group.group_size == replica_group.group_size:
        return part
    across = _group_replicas_by_key(
        shard_group, lambda replica, _, place: (replica_group.assignment[replica], place)
    )
    # Squares are taken once; what is left is a sum.
    return _all_reduce(part, "add" if op == "square_add" else op, across)


def _all_reduce(t: popxl.Tensor, op: CollectiveOps, group: ReplicaGrouping) -> popxl.Tensor:
    if group.group_size == 1 and op != "square_add":
        return t
    return ops.collectives.replicated_all_reduce(t, op, group)


def reduce_replica_sharded_graph(
    tensors: DotTree[Any],
    op: CollectiveOps = "add",
    use_io_tiles: bool = False,
    shard_groups: NamedReplicaGrouping | None = None,
    replica_group: ReplicaGrouping | None = None,
) -> tuple[GraphWithNamedArgs, list[str]]:
    """Create a graph that reduces and shards each tensor by `reduce_replica_sharded_tensor`.

    Args:
        tensors: tensors of the specs that the graph will be called with, or variable factories.
        shard_groups: for each name the replicas over which the result is cut; default: as
            `replica_group`.
        replica_group: replicas whose values are combined; default: all.

    Returns:
        The graph, with named inputs, and the names of its outputs.
    """
    groups = {} if shard_groups is None else shard_groups.to_dict()

    def reduce(name: str, t: popxl.Tensor) -> popxl.Tensor:
        return reduce_replica_sharded_tensor(t, op, replica_group, groups.get(name))

    return create_mapping_graph(tensors, reduce, use_io_tiles)
