"""Names shared by the collectives: reduction operators and communication groups."""

from __future__ import annotations

import enum
from typing import Any, Literal, get_args

import jax.numpy as jnp

from popxl.context import get_ir
from popxl.ops import _collective as collective
from popxl.replica_grouping import ReplicaGrouping

CollectiveOps = Literal["add", "mean", "mul", "min", "max", "and", "or", "square_add"]
OP_MAP = {name: name for name in get_args(CollectiveOps)}


class CommGroupType(enum.Enum):
    """How PopART describes groups of replicas; PopXL programs use ReplicaGrouping."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    Ungrouped = 3


class CommGroup:
    """A communication group: a type and a group size."""

    def __init__(self, type: CommGroupType = CommGroupType.All, replicaGroupSize: int = 0) -> None:  # noqa: N803
        self.type = type
        self.replicaGroupSize = replicaGroupSize


def to_collective_op(op: CollectiveOps) -> CollectiveOps:
    """Check the name of a reduction. Raises ValueError if it is unknown."""
    if op not in get_args(CollectiveOps):
        raise ValueError(
            f"unknown reduction {op!r}: use one of {', '.join(get_args(CollectiveOps))}"
        )
    return op


def group_or_all(group: ReplicaGrouping | None) -> ReplicaGrouping:
    """`group`, or the group of all replicas. Raises ValueError for a group of another Ir."""
    ir = get_ir()
    if group is None:
        return ir.replica_grouping()
    if len(group.assignment) != ir.replication_factor:
        raise ValueError(
            f"the grouping is for {len(group.assignment)} replicas, but the Ir has "
            f"{ir.replication_factor}"
        )
    return group


def reduce(x: Any, op: CollectiveOps, group: ReplicaGrouping) -> Any:
    """All-reduce of arrays, in float32 for half types with 'add', as the field does."""
    if op == "add":
        return collective.psum(x, group)
    if op == "mean":
        return collective.psum(x, group) / jnp.asarray(group.group_size, x.dtype)
    if op == "square_add":
        return collective.psum(x * x, group)
    if op == "max":
        return collective.pmax(x, group)
    if op == "min":
        return collective.pmin(x, group)
    if op == "mul":
        return jnp.prod(collective.all_gather(x, group, 0, tiled=False), axis=0, dtype=x.dtype)
    reduce_bool = collective.pmin if op == "and" else collective.pmax
    return reduce_bool(x.astype(jnp.int32), group).astype(x.dtype)
