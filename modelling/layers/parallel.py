"""Replica groups of tensor and data parallelism, and their collectives in layers.

Replica r is member r % tp of the tensor-parallel group r // tp: a group's members are neighbours,
and each group has its own samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import popxl
from popxl import ReplicaGrouping, Tensor, ops
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)


@dataclass(frozen=True)
class ParallelGroups:
    """Tensor- and data-parallel replica groups of an Ir.

    `sharded` and `replicated` are the groups of replicas with equal values of a variable, `tp` and
    `dp` those that communicate.

    Attributes:
        tensor_parallel: number of replicas that share one copy of the model.
        data_parallel: number of copies of the model.
        sharded: of variables sharded over tensor parallelism; group i has shard i.
        replicated: of all other variables: one group of all replicas.
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
    def from_current_ir(cls, tensor_parallel: int) -> ParallelGroups:
        """Returns the replica groups of the current Ir.

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

    def vocab_shard_size(self, vocab_size: int) -> int:
        """Returns the rows of a replica's vocabulary shard; the last shard is padded to as many."""
        return -(-vocab_size // self.tensor_parallel)

    def shard_grouping(self, shard_replicas: int) -> ReplicaGrouping:
        """Returns the replica grouping of a variable that has several replicas of each shard.

        Args:
            shard_replicas: number of neighbours in a tensor-parallel group with the same shard.
        """
        if shard_replicas == 1:
            return self.sharded
        replicas = self.tensor_parallel * self.data_parallel
        shard_of_replica = [r % self.tensor_parallel // shard_replicas for r in range(replicas)]
        return popxl.gir().replica_grouping_from_assignments(shard_of_replica)

    # ---- in graphs ------------------------------------------------------------------------------
    def copy_to_tp(self, x: Tensor) -> Tensor:
        """Enters a tensor-parallel region: the identity, whose gradient is summed over the group.

        Args:
            x: any shape, equal on all replicas of the group.

        Returns:
            `x`. Its gradient is summed over the group.
        """
        if self.tensor_parallel == 1:
            return x
        return replicated_all_reduce_identical_inputs(x, group=self.tp)

    def reduce_from_tp(self, x: Tensor) -> Tensor:
        """Leaves a tensor-parallel region: sums `x` over the tensor-parallel group."""
        if self.tensor_parallel == 1:
            return x
        return replicated_all_reduce_identical_grad_inputs(x, group=self.tp)

    def sum_grad_over_shard_replicas(self, t: Tensor, shard_replicas: int) -> Tensor:
        """Returns `t`; its gradient is summed over the replicas that have the same shard.

        Each of them uses the shard for a part of the work.
        """
        if shard_replicas == 1:
            return t
        replicas = self.tensor_parallel * self.data_parallel
        neighbours = [r // shard_replicas for r in range(replicas)]
        group = popxl.gir().replica_grouping_from_assignments(neighbours)
        return replicated_all_reduce_identical_inputs(t, group=group)

    def scale_grad_by_shard_replicas(self, x: Tensor, shard_replicas: int) -> Tensor:
        """Returns `x`; its gradient is divided by the number of replicas with the same shard.

        They all do the same work in a tensor-parallel region, and `copy_to_tp` sums over them.
        """
        if shard_replicas == 1:
            return x
        from modelling.layers.divide_gradient import divide_gradient

        return divide_gradient(x, shard_replicas)

    def tp_rank(self) -> Tensor:
        """Returns this replica's index in its tensor-parallel group, int32 (1,)."""
        ranks = popxl.constant(np.arange(self.tensor_parallel), popxl.int32, "tensor_parallel_rank")
        return ops.collectives.replicated_slice(ranks, 0, self.tp).reshape((1,))

    def tp_seed(self, seed: Tensor | None) -> Tensor | None:
        """Derives a seed, uint32 (2,), that differs between replicas of a tensor-parallel group.

        It is for random numbers in a tensor-parallel region; None if `seed` is.
        """
        if seed is None or self.tensor_parallel == 1:
            return seed
        return ops.create_random_seed(seed, self.tp_rank())
