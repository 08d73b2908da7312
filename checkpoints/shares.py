"""What each of several processes stores of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

import popdist
from checkpoints.parts import CutTensor, InParts, Layout
from checkpoints.shards import as_stored
from checkpoints.tables import stored_name


@dataclass(frozen=True)
class Shares:
    """How tensors that are in parts on several processes are divided among them.

    Attributes:
        layouts: each once.
        cut: which of them a tensor has, by name.
        held: the parts of its layout that this process stores, by the tensor's name.
    """

    layouts: list[Layout]
    cut: dict[str, int]
    held: dict[str, list[int]]
    _tensors: Mapping[str, CutTensor]

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """What this process stores, under the names in the files; the arrays are the caller's."""
        for name, parts in self.held.items():
            read = self._tensors[name].read
            values = [read(part) for part in parts]
            array = np.concatenate(values) if len(values) > 1 else values[0]
            yield stored_name(name, popdist.getInstanceIndex()), as_stored(name, array)


class Divided:
    """Divides parts among processes: of those that hold one, the one with least to store takes it.

    It takes seconds where there are thousands of devices, and is done once for tensors that are cut
    as they were at the save before.
    """

    def __init__(self) -> None:
        self._tensors: list[CutTensor] = []
        self._shares: Shares | None = None

    def of(self, tensors: InParts) -> Shares:
        """Each process's share of the tensors."""
        found = list(tensors.parts())
        before = self._shares
        if before is not None and list(map(_form, found)) == list(map(_form, self._tensors)):
            self._shares = replace(before, _tensors={one.name: one for one in found})
        else:
            self._shares = _shares_of(found)
        self._tensors = found  # whose layouts live on, so that no other has their identity
        return self._shares


def _form(tensor: CutTensor) -> tuple[str, int, int, int]:
    """What decides who stores a tensor's parts. Tensors that are cut alike share their layout."""
    return tensor.name, tensor.dtype.itemsize, id(tensor.layout), id(tensor.holders)


def _shares_of(tensors: Sequence[CutTensor]) -> Shares:
    loads, process = _Loads(), popdist.getInstanceIndex()
    places: dict[int, int] = {}
    layouts: list[Layout] = []
    cut: dict[str, int] = {}
    held: dict[str, list[int]] = {}
    for one in tensors:
        if id(one.layout) not in places:
            places[id(one.layout)] = len(layouts)
            layouts.append(one.layout)
        cut[one.name] = places[id(one.layout)]
        mine = loads.take(one)[process]
        if mine:
            held[one.name] = mine
    return Shares(layouts, cut, held, {one.name: one for one in tensors})


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

    def __init__(self) -> None:
        self._bytes = [0] * popdist.getNumInstances()

    def owner(self, nbytes: int, processes: Sequence[int]) -> int:
        """Which of the processes that have something stores it: the one that has least to store."""
        owner = min(processes, key=self._bytes.__getitem__)
        self._bytes[owner] += nbytes
        return owner

    def take(self, tensor: CutTensor) -> Mapping[int, list[int]]:
        """The parts of a tensor that each process stores."""
        parts: dict[int, list[int]] = defaultdict(list)
        size = tensor.dtype.itemsize
        for number, (part, processes) in enumerate(zip(tensor.layout, tensor.holders, strict=True)):
            parts[self.owner(part.size * size, processes)].append(number)
        return parts
