"""Replica groupings by name, and groupings that follow the borders of machines.

An *instance* is one process of a distributed program. PopXL's *IPU-link domain* (ILD) is the set
of replicas joined by the fast interconnect: here that is the replicas of one instance, unless the
launcher says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import popxl
from popxl import ReplicaGrouping
from popxl_addons.dot_tree import DotTree

CLS = TypeVar("CLS", bound="NamedReplicaGrouping")


class NamedReplicaGrouping(DotTree[ReplicaGrouping]):
    """Replica groupings by name."""

    @classmethod
    def build_groups(cls: type[CLS], names: Iterable[str], value: ReplicaGrouping) -> CLS:
        """The same grouping under each of `names`."""
        names = list(names)
        return cls.pack(names, [value] * len(names))


def fill_none_group(
    rg: ReplicaGrouping | None, none_value: ReplicaGrouping | None
) -> ReplicaGrouping | None:
    """`rg`, or `none_value` where `rg` is None."""
    return none_value if rg is None else rg


def _within_blocks(grouping: ReplicaGrouping | None, block: int) -> ReplicaGrouping:
    """Cut the groups of `grouping` where they cross from one block of replicas to the next."""
    ir = popxl.gcg().ir
    grouping = ir.replica_grouping() if grouping is None else grouping
    pairs = [(group, replica // block) for replica, group in enumerate(grouping.assignment)]
    if len(set(pairs)) == grouping.num_groups:
        return grouping
    labels = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
    return ir.replica_grouping_from_assignments([labels[pair] for pair in pairs])


def get_instance_replica_grouping(
    replica_grouping: ReplicaGrouping | None = None,
) -> ReplicaGrouping:
    """The parts of the groups (default: of all replicas) that lie in one instance."""
    return _within_blocks(replica_grouping, popxl.gcg().ir.instance_replication_factor)


def is_cross_instance(replica_grouping: ReplicaGrouping) -> bool:
    """Whether a group has replicas in several instances."""
    return get_instance_replica_grouping(replica_grouping) != replica_grouping


def get_ild_size_from_popdist() -> int:
    """Replicas in a link domain: those of one instance."""
    return popxl.gcg().ir.instance_replication_factor


def get_ild_replica_grouping(replica_grouping: ReplicaGrouping | None = None) -> ReplicaGrouping:
    """The parts of the groups (default: of all replicas) that lie in one link domain."""
    return _within_blocks(replica_grouping, get_ild_size_from_popdist())


def is_cross_ild(replica_grouping: ReplicaGrouping) -> bool:
    """Whether a group has replicas in several link domains."""
    return get_ild_replica_grouping(replica_grouping) != replica_grouping
