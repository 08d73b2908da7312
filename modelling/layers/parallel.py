"""The replica groups of tensor and data parallelism, and what layers do with them.

Replica r is member r % tp of the tensor-parallel group r // tp: a group's members are neighbours,
and each group works on its own samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import popxl
from popxl import ReplicaGrouping, Tensor, ops
from popxl.custom import jax_op
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)


def _divide_gradient(
    inputs: Any, outputs: Any, dys: tuple[Any, ...], shard_replicas: int
) -> tuple[Any]:
    return (dys[0] / shard_replicas,)


@jax_op(name="shared_gradient", grad=_divide_gradient)
def _shared(x: Any, *, shard_replicas: int) -> Any:
    """`x`; its gradient is divided by `shard_replicas`."""
    return x


@dataclass(frozen=True)
class ParallelGroups:
    """Replica groups of an Ir. `sharded` and `replicated` say which replicas hold a variable alike,
    `tp` and `dp` which ones communicate.

    Attributes:
        tensor_parallel: replicas that share one copy of the model.
        data_parallel: copies of the model.
        sharded: for variables cut over tensor parallelism; group i holds shard i.
        identical: for all other variables: one group of all replicas.
        tp: replicas that compute a layer together.
        dp: replicas that reduce gradients of a sharded variable.
    """

    tensor_parallel: int
    data_parallel: int
    sharded: ReplicaGrouping
    replicated: ReplicaGrouping
    tp: ReplicaGrouping
    dp: ReplicaGrouping

    @classmethod
    def current(cls, tensor_parallel: int) -> ParallelGroups:
        """The groups of the current Ir.

        Raises:
            ValueError: the number of replicas is no multiple of `tensor_parallel`.
        """
        ir = popxl.gir()
        replicas = ir.replication_factor
        if replicas % tensor_parallel:
            raise ValueError(
                f"the Ir has {replicas} replicas, which is no multiple of tensor_parallel "
                f"{tensor_parallel}: set ir.replication_factor to data_parallel × tensor_parallel"
            )
        data_parallel = replicas // tensor_parallel
        sharded = ir.replica_grouping(stride=tensor_parallel, group_size=data_parallel)
        return cls(
            tensor_parallel=tensor_parallel,
            data_parallel=data_parallel,
            sharded=sharded,
            replicated=ir.replica_grouping(),
            tp=sharded.transpose(),
            dp=sharded,
        )

    def vocab_shard_size(self, vocabulary: int) -> int:
        """A replica's part of a vocabulary, whose last part is padded if it is shorter."""
        return -(-vocabulary // self.tensor_parallel)

    def shard_grouping(self, shard_replicas: int) -> ReplicaGrouping:
        """For variables that so many neighbours of a tensor-parallel group hold alike."""
        if shard_replicas == 1:
            return self.sharded
        replicas = self.tensor_parallel * self.data_parallel
        members = [r % self.tensor_parallel // shard_replicas for r in range(replicas)]
        return popxl.gir().replica_grouping_from_assignments(members)

    # ---- in graphs ------------------------------------------------------------------------------
    def copy_to_tp(self, x: Tensor) -> Tensor:
        """Begin a computation in which the members of a group do different parts of the work.

        Args:
            x: the same on all members.

        Returns:
            `x`. Its gradient, of which each member has a part, is summed over the group.
        """
        if self.tensor_parallel == 1:
            return x
        return replicated_all_reduce_identical_inputs(x, group=self.tp)

    def sum_grad_over_shard_replicas(self, t: Tensor, shard_replicas: int) -> Tensor:
        """Begin the use of a tensor that so many neighbours hold alike, each for a part of the
        work: its gradient is the sum over them."""
        if shard_replicas == 1:
            return t
        replicas = self.tensor_parallel * self.data_parallel
        neighbours = [r // shard_replicas for r in range(replicas)]
        group = popxl.gir().replica_grouping_from_assignments(neighbours)
        return replicated_all_reduce_identical_inputs(t, group=group)

    def scale_grad_by_shard_replicas(self, x: Tensor, shard_replicas: int) -> Tensor:
        """Begin work that so many neighbours all do in whole, inside a sharded computation.

        Returns:
            `x`. Each has its whole gradient and passes a share on, since `copy_to_tp` adds all.
        """
        return x if shard_replicas == 1 else _shared(x, shard_replicas=shard_replicas)

    def reduce_from_tp(self, x: Tensor) -> Tensor:
        """End a sharded computation: the sum of what the members of a group have."""
        if self.tensor_parallel == 1:
            return x
        return replicated_all_reduce_identical_grad_inputs(x, group=self.tp)

    def tp_rank(self) -> Tensor:
        """This replica's position in its tensor-parallel group, int32 of shape (1,)."""
        ranks = popxl.constant(np.arange(self.tensor_parallel), popxl.int32, "tensor_parallel_rank")
        return ops.collectives.replicated_slice(ranks, 0, self.tp).reshape((1,))

    def tp_seed(self, seed: Tensor | None) -> Tensor | None:
        """A seed of this member's own, for random numbers inside a sharded computation."""
        if seed is None or self.tensor_parallel == 1:
            return seed
        return ops.create_random_seed(seed, self.tp_rank())
