"""What each of several processes stores of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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


def shares_of(tensors: InParts) -> Shares:
    """Divide the parts: what several processes have, the one that has least stores."""
    loads, process = _Loads(), popdist.getInstanceIndex()
    places: dict[int, int] = {}
    layouts: list[Layout] = []
    cut: dict[str, int] = {}
    held: dict[str, list[int]] = {}
    own: dict[str, CutTensor] = {}
    for one in tensors.parts():
        if id(one.layout) not in places:  # each is shared by the tensors that are cut alike
            places[id(one.layout)] = len(layouts)
            layouts.append(one.layout)
        cut[one.name] = places[id(one.layout)]
        mine = loads.take(one)[process]
        if mine:
            held[one.name], own[one.name] = mine, one
    return Shares(layouts, cut, held, own)


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
