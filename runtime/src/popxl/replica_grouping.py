"""Partitions of the replicas into groups of equal size."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from popxl.ir import Ir


class ReplicaGrouping:
    """Assigns each replica to a group. Made by `ir.replica_grouping` or `..._from_assignments`.

    A *const* grouping is described by a stride and a group size: groups take every `stride`-th
    replica. Any other partition is described by its assignment (group of each replica).
    """

    def __init__(self) -> None:
        raise TypeError(
            "Cannot create ReplicaGrouping instances directly; use ir.replica_grouping(...)"
        )

    _ir: Ir
    _assignment: tuple[int, ...]

    @classmethod
    def _from_stride(cls, ir: Ir, stride: int, group_size: int | None) -> ReplicaGrouping:
        replicas = ir.replication_factor
        size = max(replicas // stride, 1) if group_size is None and stride > 0 else group_size
        if stride < 1 or size is None or size < 1 or replicas % size != 0:
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
    def _from_assignment(cls, ir: Ir, assignment: tuple[int, ...]) -> ReplicaGrouping:
        replicas = ir.replication_factor
        if len(assignment) != replicas:
            raise ValueError(
                f"an assignment needs one group for each of the {replicas} replicas, but has "
                f"{len(assignment)} entries"
            )
        groups = sorted(set(assignment))
        sizes = {assignment.count(g) for g in groups}
        if groups != list(range(len(groups))) or len(sizes) != 1:
            raise ValueError(
                f"assignment {list(assignment)} must use the groups 0..n-1 and give each the same "
                "number of replicas"
            )
        self = object.__new__(cls)
        self._ir, self._assignment = ir, assignment
        return self

    @property
    def num_groups(self) -> int:
        return max(self._assignment) + 1

    @property
    def group_size(self) -> int:
        """Replicas in each group."""
        return len(self._assignment) // self.num_groups

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The replicas of each group, ascending, group by group."""
        members: list[list[int]] = [[] for _ in range(self.num_groups)]
        for replica, group in enumerate(self._assignment):
            members[group].append(replica)
        return tuple(map(tuple, members))

    @cached_property
    def _stride(self) -> int | None:
        if self.group_size == 1:
            return 1 if self._assignment == tuple(range(len(self._assignment))) else None
        first = self.groups[0]
        stride = first[1] - first[0]
        block = stride * self.group_size
        if len(self._assignment) % block:
            return None
        expected = tuple((r // block) * stride + r % stride for r in range(len(self._assignment)))
        return stride if expected == self._assignment else None

    @property
    def is_const(self) -> bool:
        """Whether a stride and a group size describe the grouping."""
        return self._stride is not None

    @property
    def stride(self) -> int:
        """Distance between the replicas of a group. Raises ValueError if it is not constant."""
        if self._stride is None:
            raise ValueError(f"{self!r} has no constant stride; use `assignment`")
        return self._stride

    @property
    def assignment(self) -> list[int]:
        """The group of each replica."""
        return list(self._assignment)

    @cached_property
    def const_rg(self) -> ReplicaGrouping:
        """A const grouping that refines this one: itself, or one group for each replica."""
        if self.is_const:
            return self
        return ReplicaGrouping._from_stride(self._ir, 1, 1)

    @property
    def to_device_map(self) -> list[int] | None:
        """For a non-const grouping: the group whose host data each replica receives."""
        return None if self.is_const else self.assignment

    @property
    def to_host_map(self) -> list[int] | None:
        """For a non-const grouping: the first replica of each group, which is read back."""
        return None if self.is_const else [group[0] for group in self.groups]

    def transpose(self) -> ReplicaGrouping:
        """The orthogonal grouping: i-th members of all groups form a group.

        If this one describes tensor parallelism, the transpose describes data parallelism.
        """
        assignment = [0] * len(self._assignment)
        for group in self.groups:
            for i, replica in enumerate(group):
                assignment[replica] = i
        return ReplicaGrouping._from_assignment(self._ir, tuple(assignment))

    def __repr__(self) -> str:
        if self.is_const:
            return (
                f"ReplicaGrouping(num_groups={self.num_groups}, stride={self.stride}, "
                f"group_size={self.group_size})"
            )
        return f"ReplicaGrouping(assignment={list(self._assignment)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplicaGrouping) and self._assignment == other._assignment

    def __hash__(self) -> int:
        return hash(self._assignment)
