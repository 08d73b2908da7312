"""Partitions of the replicas into groups of equal size."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cache
from itertools import pairwise
from typing import Protocol


class ReplicatedIr(Protocol):
    """Protocol of an `Ir` that replica groupings use: its replication factor."""

    @property
    def replication_factor(self) -> int: ...


@cache
def _replicas_by_group(assignment: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the replicas of each group of an assignment, in ascending order."""
    members: list[list[int]] = [[] for _ in range(max(assignment) + 1)]
    for replica, group in enumerate(assignment):
        members[group].append(replica)
    return tuple(map(tuple, members))


@cache
def _constant_stride(assignment: tuple[int, ...]) -> int | None:
    """Returns the stride that describes an assignment of replicas to groups; None if none does."""
    groups = _replicas_by_group(assignment)
    if len(groups) == len(assignment):
        return 1
    stride = groups[0][1] - groups[0][0]
    block = stride * len(groups[0])
    if len(assignment) % block:
        return None
    expected = tuple((r // block) * stride + r % stride for r in range(len(assignment)))
    return stride if expected == assignment else None


@cache
def _coarsest_stride_and_size(assignment: tuple[int, ...]) -> tuple[int, int]:
    """Returns stride and group size of the coarsest constant-stride grouping in an assignment."""
    groups = _replicas_by_group(assignment)
    stride = min(b - a for group in groups for a, b in pairwise(group))
    size = 0
    for group in groups:
        ends = [i for i, (a, b) in enumerate(pairwise(group), 1) if b - a > stride]
        for start, end in pairwise([0, *ends, len(group)]):
            size = math.gcd(size, end - start)
    return (stride, size) if size > 1 else (1, 1)


def _renumber(labels: Sequence[Hashable]) -> tuple[int, ...]:
    """Renumbers group labels from 0 in order of first appearance."""
    numbers = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    return tuple(numbers[label] for label in labels)


class ReplicaGrouping:
    """Partition of the replicas into groups; created by `ir.replica_grouping`.

    Or by `ir.replica_grouping_from_assignments`.

    A *const* grouping is described by a stride and a group size: groups take every `stride`-th
    replica. Any other partition is described by its assignment (group of each replica).

    The group of all replicas follows `ir.replication_factor`, which may be set after the program
    is written; other groupings are for the number of replicas they were made with.
    """

    def __init__(self) -> None:
        raise RuntimeError(
            "Cannot create ReplicaGrouping instances directly; use ir.replica_grouping(...)"
        )

    _ir: ReplicatedIr
    _fixed: tuple[int, ...] | None  # None: all replicas, however many there will be

    @classmethod
    def _of_all_replicas(cls, ir: ReplicatedIr) -> ReplicaGrouping:
        self = object.__new__(cls)
        self._ir, self._fixed = ir, None
        return self

    @classmethod
    def _from_stride(cls, ir: ReplicatedIr, stride: int, group_size: int | None) -> ReplicaGrouping:
        if stride == 1 and group_size is None:
            return cls._of_all_replicas(ir)
        replicas = ir.replication_factor
        size = max(replicas // stride, 1) if group_size is None else group_size
        if replicas % size != 0:
            raise ValueError(
                f"stride {stride} and group size {group_size} do not divide {replicas} replicas "
                "into equal groups"
            )
        if size > 1 and (replicas % (stride * size) != 0):
            raise ValueError(
                f"a stride of {stride} with a group size of {size} does not fit {replicas} "
                "replicas: their product must divide the replication factor"
            )
        block = stride * size
        assignment = tuple(
            (r // block) * stride + r % stride if size > 1 else r for r in range(replicas)
        )
        return cls._from_assignment(ir, assignment)

    @classmethod
    def _from_assignment(cls, ir: ReplicatedIr, assignment: tuple[int, ...]) -> ReplicaGrouping:
        replicas = ir.replication_factor
        if len(assignment) != replicas:
            raise ValueError(
                f"an assignment needs one group for each of the {replicas} replicas, but has "
                f"{len(assignment)} entries"
            )
        groups = list(dict.fromkeys(assignment))
        sizes = {assignment.count(g) for g in groups}
        if groups != list(range(len(groups))) or len(sizes) != 1:
            raise ValueError(
                f"assignment {list(assignment)} must number the groups 0..n-1 in the order of "
                "their first replica, and give each the same number of replicas"
            )
        self = object.__new__(cls)
        self._ir, self._fixed = ir, assignment
        return self

    @property
    def _assignment(self) -> tuple[int, ...]:
        return (0,) * self._ir.replication_factor if self._fixed is None else self._fixed

    @property
    def num_groups(self) -> int:
        return max(self._assignment) + 1

    @property
    def group_size(self) -> int:
        """Number of replicas in each group."""
        return len(self._assignment) // self.num_groups

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns the replicas of each group, in ascending order."""
        return _replicas_by_group(self._assignment)

    @property
    def _stride(self) -> int | None:
        return _constant_stride(self._assignment)

    @property
    def is_const(self) -> bool:
        """True if a constant stride and a group size describe the grouping."""
        return self._stride is not None

    @property
    def stride(self) -> int:
        """Distance between consecutive replicas of a group.

        Raises:
            NotImplementedError: it is not constant.
        """
        if self._stride is None:
            raise NotImplementedError(
                f"{self!r} has no constant stride; use `const_rg`, or `assignment`"
            )
        return self._stride

    @property
    def assignment(self) -> list[int]:
        """Group number of each replica."""
        return list(self._assignment)

    @property
    def const_rg(self) -> ReplicaGrouping:
        """Coarsest constant-stride grouping whose groups lie inside the groups of this one.

        Groups are broken into runs wherever replicas are further apart than the smallest distance
        between neighbours, and the runs into equal parts.
        """
        return (
            self
            if self.is_const
            else self._from_stride(self._ir, *_coarsest_stride_and_size(self._assignment))
        )

    def _const_groups_with_owners(self) -> tuple[tuple[int, int], ...]:
        """Pairs (group of `const_rg`, group of this grouping that contains it), by number."""
        inner = zip(self.const_rg._assignment, self._assignment, strict=True)
        return tuple(dict.fromkeys(inner))

    @property
    def to_device_map(self) -> list[int] | None:
        """Returns, for each group of `const_rg`, the group around it; None if constant-stride."""
        return None if self.is_const else [group for _, group in self._const_groups_with_owners()]

    @property
    def to_host_map(self) -> list[int] | None:
        """Returns, for each group, its first group of `const_rg`; None if constant-stride."""
        if self.is_const:
            return None
        device = [group for _, group in self._const_groups_with_owners()]
        return [device.index(group) for group in range(self.num_groups)]

    def _split_groups(self, size: int) -> ReplicaGrouping:
        """Returns the grouping that splits each group into groups of `size` consecutive members."""
        if size == self.group_size:
            return self
        keys = [(0, 0)] * len(self._assignment)
        for group, members in enumerate(self.groups):
            for place, replica in enumerate(members):
                keys[replica] = (group, place // size)
        return self._from_assignment(self._ir, _renumber(keys))

    def transpose(self) -> ReplicaGrouping:
        """Returns the orthogonal grouping: the i-th members of all groups form a group.

        If this one describes tensor parallelism, the transpose describes data parallelism.
        """
        places = [0] * len(self._assignment)
        for group in self.groups:
            for i, replica in enumerate(group):
                places[replica] = i
        return ReplicaGrouping._from_assignment(self._ir, tuple(places))

    def __repr__(self) -> str:
        if self.is_const:
            return (
                f"ReplicaGrouping(num_replicas={self._ir.replication_factor}, "
                f"stride={self.stride}, group_size={self.group_size}, "
                f"num_groups={self.num_groups})"
            )
        return f"ReplicaGrouping(assignment={list(self._assignment)})"

    # Keys of caches: they must not change with the number of replicas.
    def _key(self) -> tuple[int, tuple[int, ...] | None]:
        everyone = self._fixed is None or not any(self._fixed)
        return id(self._ir), None if everyone else self._fixed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplicaGrouping) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())
