"""Trees of replica groupings by name; groupings within instances and link domains.

An *instance* is one process of a distributed program. PopXL's *IPU-link domain* (ILD) is the set
of replicas joined by the fast interconnect: here that is the replicas of one instance, unless the
launcher says otherwise.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import TypeVar

import popxl
from popxl import ReplicaGrouping
from popxl_addons.dot_tree import DotTree

CLS = TypeVar("CLS", bound="NamedReplicaGrouping")


class NamedReplicaGrouping(DotTree[ReplicaGrouping]):
    """A tree of replica groupings by name."""

    @classmethod
    def build_groups(cls: type[CLS], names: Iterable[str], value: ReplicaGrouping) -> CLS:
        """Create a tree with the same replica grouping under each of `names`."""
        names = list(names)
        return cls.pack(names, [value] * len(names))


def fill_none_group(
    rg: ReplicaGrouping | None, none_value: ReplicaGrouping | None
) -> ReplicaGrouping | None:
    """Return the replica grouping `rg`, or `none_value` if it is None."""
    return none_value if rg is None else rg


def _split_into_blocks(grouping: ReplicaGrouping | None, block: int) -> ReplicaGrouping:
    """Split replica groups at multiples of `block` replicas, so that none crosses one."""
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
    """Split replica groups (default: all replicas) so that each is within one process instance."""
    return _split_into_blocks(replica_grouping, popxl.gcg().ir.instance_replication_factor)


def is_cross_instance(replica_grouping: ReplicaGrouping) -> bool:
    """True if any replica group has replicas of several process instances."""
    return get_instance_replica_grouping(replica_grouping) != replica_grouping


TARGET_OPTIONS = "POPLAR_TARGET_OPTIONS"
_ILD_SIZE = 64


def get_ild_size_from_popdist() -> int:
    """Number of replicas in an IPU link domain, as the launcher says; default 64 or all.

    Launchers say it as `ipuLinkDomainSize` of the JSON object in the environment variable
    POPLAR_TARGET_OPTIONS; otherwise it is 64, or all replicas if there are fewer.

    Raises:
        ValueError: the variable holds no JSON object, or no such number.
    """
    text = os.environ.get(TARGET_OPTIONS, "")
    replicas = popxl.gcg().ir.replication_factor
    try:
        size = int(json.loads(text or "{}").get("ipuLinkDomainSize", min(replicas, _ILD_SIZE)))
    except (ValueError, TypeError, AttributeError):
        size = 0
    if size < 1:
        raise ValueError(
            f"the environment variable {TARGET_OPTIONS} is {text[:80]!r}: set it to a JSON object "
            'such as {"ipuLinkDomainSize": 64}'
        )
    return size


def get_ild_replica_grouping(replica_grouping: ReplicaGrouping | None = None) -> ReplicaGrouping:
    """Split replica groups (default: all replicas) so that each is within one link domain.

    Raises:
        ValueError: the grouping has a stride that exceeds the size of a link domain.
    """
    size = get_ild_size_from_popdist()
    if (
        replica_grouping is not None
        and replica_grouping.is_const
        and replica_grouping.stride > size
    ):
        raise ValueError(
            f"no two replicas of a group of {replica_grouping!r} are in one link domain of {size}"
        )
    return _split_into_blocks(replica_grouping, size)


def is_cross_ild(replica_grouping: ReplicaGrouping) -> bool:
    """True if any replica group has replicas of several link domains."""
    return get_ild_replica_grouping(replica_grouping) != replica_grouping
