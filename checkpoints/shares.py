"""What each of several processes stores of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

import popdist
from checkpoints.parts import CutTensor, ShardSource
from checkpoints.shards import as_stored
from checkpoints.tabled import ShardedTensor
from checkpoints.tables import stored_name

SMALL = 4096
"""A part that several processes hold is small if it is less than this fraction of a process's share
of all."""


@dataclass(frozen=True)
class Shares:
    """How tensors that are in parts on several processes are divided among them.

    Attributes:
        cut: the tensors, by name.
        held: the parts of its layout that this process stores, by the tensor's name.
    """

    cut: dict[str, ShardedTensor]
    held: dict[str, list[int]]
    _tensors: Mapping[str, CutTensor]

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """What this process stores, under the names in the files; the arrays are the caller's."""
        for name, parts in self.held.items():
            read = self._tensors[name].read
            values = [read(part) for part in parts]
            array = np.concatenate(values) if len(values) > 1 else values[0]
            yield stored_name(name, popdist.getInstanceIndex()), as_stored(name, array)


class ShardAssigner:
    """Divides parts among processes: of those that hold one, the one with least to store takes it.

    It takes seconds where there are thousands of devices, and is done once for tensors that are cut
    as they were at the save before.
    """

    def __init__(self) -> None:
        self._tensors: list[CutTensor] = []
        self._shares: Shares | None = None

    def of(self, tensors: ShardSource) -> Shares:
        """Each process's share of the tensors."""
        cut_tensors = list(tensors.parts())
        before = self._shares
        if before is not None and list(map(_form, cut_tensors)) == list(map(_form, self._tensors)):
            self._shares = replace(before, _tensors={one.name: one for one in cut_tensors})
        else:
            self._shares = _shares_of(cut_tensors)
        self._tensors = cut_tensors  # whose layouts live on, so that no other has their identity
        return self._shares


def _form(tensor: CutTensor) -> tuple[str, int, int, int]:
    """What decides who stores a tensor's parts. Tensors that are cut alike share their layout."""
    return tensor.name, tensor.dtype.itemsize, id(tensor.layout), id(tensor.holders)


def _shares_of(tensors: Sequence[CutTensor]) -> Shares:
    whole = sum(math.prod(one.layout[0].shape) * one.dtype.itemsize for one in tensors)
    loads, process = _Loads(whole), popdist.getInstanceIndex()
    alike: dict[tuple[int, ...], tuple[int, ...]] = {}
    cut: dict[str, ShardedTensor] = {}
    held: dict[str, list[int]] = {}
    for one in tensors:
        owners = loads.take(one)
        cut[one.name] = ShardedTensor(one.dtype, one.layout, alike.setdefault(owners, owners))
        mine = [part for part, owner in enumerate(owners) if owner == process]
        if mine:
            held[one.name] = mine
    return Shares(cut, held, {one.name: one for one in tensors})


def own_share(tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that this process stores, of several processes that all have them.

    Every process takes each from the mapping, in the same order, since it may be a value that
    devices of all of them hold.
    """
    loads = _Loads()
    for name in tensors:
        array = as_stored(name, tensors[name])
        if loads.owner(array.nbytes, range(popdist.getNumInstances())) == (
            popdist.getInstanceIndex()
        ):
            yield name, array


class _Loads:
    """How many bytes each process stores so far."""

    def __init__(self, whole: int = 0) -> None:
        """Args: `whole`: bytes of all tensors."""
        self._bytes = [0] * popdist.getNumInstances()
        self._small = whole // popdist.getNumInstances() // SMALL

    def owner(self, nbytes: int, processes: Sequence[int]) -> int:
        """Which of the processes that have something stores it: the one that has least to store."""
        owner = min(processes, key=self._bytes.__getitem__)
        self._bytes[owner] += nbytes
        return owner

    def take(self, tensor: CutTensor) -> tuple[int, ...]:
        """Which process stores each part of a tensor."""
        size = tensor.dtype.itemsize
        # Who loads reads the table of each process that has stored something it needs. What is
        # small is in one table, where it makes no difference to the load.
        return tuple(
            self.owner(
                part.size * size, processes[:1] if part.size * size < self._small else processes
            )
            for part, processes in zip(tensor.layout, tensor.holders, strict=True)
        )
