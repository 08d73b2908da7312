"""Reduction operators and communication groups of the collectives."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax.numpy as jnp

from popxl._ir.argument_checks import check_type
from popxl.context import get_ir
from popxl.ops import _collective as collective
from popxl.ops._numerics import upcast_half_types
from popxl.replica_grouping import ReplicaGrouping

CollectiveOps = Literal["add", "mean", "mul", "min", "max", "and", "or", "square_add"]
OP_MAP = {name: name for name in get_args(CollectiveOps)}


class CommGroupType(enum.Enum):
    """PopART's kinds of replica groups; PopXL programs use ReplicaGrouping instead."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    Ungrouped = 3


class CommGroup:
    """PopART's communication group: a type and a group size."""

    def __init__(self, type: CommGroupType = CommGroupType.All, replicaGroupSize: int = 0) -> None:  # noqa: N803
        self.type = type
        self.replicaGroupSize = replicaGroupSize


def to_collective_op(op: CollectiveOps) -> CollectiveOps:
    """Returns the name of a collective's reduction; raises ValueError if it is unknown."""
    if op not in get_args(CollectiveOps):
        raise ValueError(
            f"unknown reduction {op!r}: use one of {', '.join(get_args(CollectiveOps))}"
        )
    return op


def group_or_all(group: ReplicaGrouping | None) -> ReplicaGrouping:
    """Returns the replica grouping `group`; the group of all replicas if it is None.

    Raises:
        NotImplementedError: the group has no constant stride.
        ValueError: it is for another number of replicas.
    """
    ir = get_ir()
    if group is None:
        return ir.replica_grouping()
    check_type("a collective", "group", group, ReplicaGrouping)
    if not group.is_const:
        raise NotImplementedError(
            f"collectives need replicas with a constant stride, which {group!r} has not: use its "
            "`const_rg`"
        )
    if len(group.assignment) != ir.replication_factor:
        raise ValueError(
            f"the grouping is for {len(group.assignment)} replicas, but the Ir has "
            f"{ir.replication_factor}: make it by `ir.replica_grouping` of this Ir"
        )
    return group


def sum_over_group(x: Any, op: str, group: ReplicaGrouping, add: Callable[..., Any]) -> Any:
    """Returns a sum-like reduction by `add` over the group, rounded once to the dtype of `x`."""
    terms = upcast_half_types(x)  # 4 × 30000 is no float16, but its mean is
    total = add(terms * terms if op == "square_add" else terms, group)
    if op == "mean":
        total = total / jnp.asarray(group.group_size, total.dtype)
    return total.astype(x.dtype)


SUMS = ("add", "mean", "square_add")


def reduce(x: Any, op: CollectiveOps, group: ReplicaGrouping) -> Any:
    """All-reduces an array over a group; sums and products of half types in float32."""
    if op in SUMS:
        return sum_over_group(x, op, group, collective.psum)
    if op == "max":
        return collective.pmax(x, group)
    if op == "min":
        return collective.pmin(x, group)
    if op == "mul":
        gathered = upcast_half_types(collective.all_gather(x, group, 0, tiled=False))
        return jnp.prod(gathered, axis=0, dtype=gathered.dtype).astype(x.dtype)
    reduce_bool = collective.pmin if op == "and" else collective.pmax
    return reduce_bool(x.astype(jnp.int32), group).astype(x.dtype)
