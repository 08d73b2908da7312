"""Assignment of tensor shards to the processes that store them, with balanced bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

import popdist
from checkpoints.safetensors_files import to_c_order
from checkpoints.sharded_files import ShardedTensorSpec, stored_name
from checkpoints.tensor_shards import ShardedTensor, ShardSource

SMALL_FRACTION = 4096
"""A replicated shard is small below this fraction of the mean bytes of a process."""


@dataclass(frozen=True)
class ShardAssignment:
    """Assignment of a checkpoint's tensor shards to the processes that write them.

    Attributes:
        sharded: the tensors by name, for the manifest.
        local_shards: indices of the shards of this process by tensor name.
    """

    sharded: dict[str, ShardedTensorSpec]
    local_shards: dict[str, list[int]]
    _tensors: Mapping[str, ShardedTensor]

    def local_arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield stored name and new array of each tensor whose shards this process stores."""
        for name, shards in self.local_shards.items():
            read = self._tensors[name].read
            values = [read(shard) for shard in shards]
            array = np.concatenate(values) if len(values) > 1 else values[0]
            yield stored_name(name, popdist.getInstanceIndex()), to_c_order(name, array)


class ShardAssigner:
    """Assigns each tensor shard to the process with the fewest bytes among the shard's holders.

    With thousands of devices that takes seconds, so the assignment is reused while the tensors'
    sharding stays the same.
    """

    def __init__(self) -> None:
        self._tensors: list[ShardedTensor] = []
        self._assignment: ShardAssignment | None = None

    def assign_shards(self, source: ShardSource) -> ShardAssignment:
        """Assign the shards of all tensors of a checkpoint to processes that store them."""
        tensors = list(source.sharded_tensors())
        last = self._assignment
        if last is not None and list(map(_assignment_key, tensors)) == list(
            map(_assignment_key, self._tensors)
        ):
            self._assignment = replace(last, _tensors={one.name: one for one in tensors})
        else:
            self._assignment = _assign_shards(tensors)
        self._tensors = tensors  # keeps the layouts alive, so that their ids are not reused
        return self._assignment


def _assignment_key(tensor: ShardedTensor) -> tuple[str, int, int, int]:
    """Return the cache key of a tensor's shard assignment: all properties that it depends on."""
    return tensor.name, tensor.dtype.itemsize, id(tensor.layout), id(tensor.processes)


def _assign_shards(tensors: Sequence[ShardedTensor]) -> ShardAssignment:
    nbytes = sum(math.prod(one.layout[0].shape) * one.dtype.itemsize for one in tensors)
    balancer, process = _LoadBalancer(nbytes), popdist.getInstanceIndex()
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal owners become one object
    sharded: dict[str, ShardedTensorSpec] = {}
    local_shards: dict[str, list[int]] = {}
    for one in tensors:
        owners = balancer.assign_shards(one)
        owners = shared.setdefault(owners, owners)
        sharded[one.name] = ShardedTensorSpec(one.dtype, one.layout, owners)
        local = [shard for shard, owner in enumerate(owners) if owner == process]
        if local:
            local_shards[one.name] = local
    return ShardAssignment(sharded, local_shards, {one.name: one for one in tensors})


def iter_local_tensors(tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors that this process stores, when all processes can read all tensors.

    Collective: every process reads every tensor, in the same order, since reading one can gather it
    from the devices of all processes.
    """
    balancer = _LoadBalancer()
    for name in tensors:
        array = to_c_order(name, tensors[name])
        owner = balancer.assign_bytes(array.nbytes, range(popdist.getNumInstances()))
        if owner == popdist.getInstanceIndex():
            yield name, array


class _LoadBalancer:
    """Assigns bytes of tensors to processes, each time to the one that stores the fewest so far."""

    def __init__(self, nbytes: int = 0) -> None:
        """Start with no bytes assigned, of `nbytes` of all tensors."""
        self._bytes = [0] * popdist.getNumInstances()
        self._small_bytes = nbytes // popdist.getNumInstances() // SMALL_FRACTION

    def assign_bytes(self, nbytes: int, processes: Sequence[int]) -> int:
        """Assign `nbytes` to the process with the fewest bytes; returns that process."""
        owner = min(processes, key=self._bytes.__getitem__)
        self._bytes[owner] += nbytes
        return owner

    def assign_shards(self, tensor: ShardedTensor) -> tuple[int, ...]:
        """Assign each shard of a tensor to a process; returns the processes in order of shards."""
        # A loading process reads one record file for each process that stored a shard it needs.
        # Small shards all go to the first holder: that hardly changes the balance, and saves files.
        owners = []
        for shard, processes in zip(tensor.layout, tensor.processes, strict=True):
            nbytes = shard.length * tensor.dtype.itemsize
            owners.append(
                self.assign_bytes(
                    nbytes, processes[:1] if nbytes < self._small_bytes else processes
                )
            )
        return tuple(owners)
