"""Tensors that several processes store in shards: who stores which, and how they are read back.

The manifest says which process has stored which shard. So a process that loads needs the records of
those alone whose shards it reads, and their files: on a thousand hosts, a few of them each.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

import popdist
from checkpoints.errors import CheckpointError, DamagedError
from checkpoints.safetensors_files import Stored, TensorSpec, as_stored
from checkpoints.tensor_files import TensorFiles, open_records, read_records
from checkpoints.tensor_shards import (
    CutTensor,
    Layout,
    Part,
    ShardSource,
    StoredParts,
    assembled,
    chunks_needed,
    with_starts,
)
from files.formatting import format_name

SMALL = 4096
"""A part that several processes hold is small if it is less than this fraction of a process's share
of all."""


class ShardedTensor(NamedTuple):
    """A tensor that is stored in parts.

    Attributes:
        layout: the parts; tensors that are cut alike have the same object.
        owners: which process stores each; the same object for tensors that are divided alike.
    """

    dtype: np.dtype
    layout: Layout
    owners: Sequence[int]

    @property
    def held(self) -> dict[int, list[Part]]:
        """The parts that each process stores, one after the other."""
        by_process: dict[int, list[Part]] = {}
        for owner, part in zip(self.owners, self.layout, strict=True):
            by_process.setdefault(owner, []).append(part)
        return by_process


class ShardedTensorFiles(TensorFiles):
    """The table of a process is read, and its files are opened, when a part that it has stored is
    asked for; any thread may ask. What is wrong with them is a DamagedError then."""

    def __init__(
        self, folder: Path, tables: Sequence[tuple[str, str]], cut: Mapping[str, ShardedTensor]
    ) -> None:
        """Open nothing.

        Args:
            tables: file and SHA-256 of each process's table.
            cut: the tensors, by name.
        """
        super().__init__(())
        self._names = self._cut = cut
        self._folder, self._tables = folder, tables
        self._held: dict[tuple[int, int], dict[int, list[Part]]] = {}
        self._chunks: dict[tuple[object, ...], dict[int, tuple[int, ...]]] = {}
        self._reading = threading.Lock()
        self._opened: dict[int, TensorFiles] = {}

    def open_all(self) -> None:
        """Read all tables, and open all files, so that deleting them does not disturb.

        Raises:
            DamagedError: one is missing or damaged, or is not what the manifest says.
        """
        for process in range(len(self._tables)):
            self._of(process)

    @property
    def tables_read(self) -> int:
        """How many tables were read so far."""
        return len(self._opened)

    def __getitem__(self, name: str) -> np.ndarray:
        """As of `TensorFiles`."""
        return self._assembled(name, {p: self._read(stored_name(name, p)) for p in self._by(name)})

    def some(self, name: str, wanted: Sequence[Part]) -> np.ndarray:
        """As of `TensorFiles`."""
        needed = self._needed(name, tuple(wanted)).items()
        return self._assembled(name, {p: self._read(stored_name(name, p), n) for p, n in needed})

    def spec(self, name: str) -> TensorSpec:
        """As of `TensorFiles`; reads nothing."""
        cut = self._cut[name]
        return TensorSpec(cut.dtype, cut.layout[0].shape)

    def opened(self, name: str) -> tuple[Stored, Sequence[str] | None]:
        """As of `TensorFiles`; reads the records of who stored it, if nobody has done so."""
        return self._of(_taken_apart(name)[1]).opened(name)

    def _stored_spec(self, name: str) -> TensorSpec:
        tensor, process = _taken_apart(name)
        size = sum(part.size for part in self._by(tensor)[process])
        return TensorSpec(self._cut[tensor].dtype, (size,))

    def _stored_names(self) -> list[str]:
        return [stored_name(name, process) for name in self._cut for process in self._by(name)]

    def _needed(self, name: str, wanted: tuple[Part, ...]) -> dict[int, tuple[int, ...]]:
        """The chunks that have elements of the parts `wanted`, of what each process stored."""
        # On a thousand hosts a tensor has thousands of parts: tensors that are alike need alike.
        cut = self._cut[name]
        key = id(cut.layout), id(cut.owners), cut.dtype, wanted
        if key not in self._chunks:
            spans = tuple(
                StoredParts(
                    self._chunk_elements(stored_name(name, process)), tuple(with_starts(parts))
                )
                for process, parts in self._by(name).items()
            )
            needed = zip(self._by(name), chunks_needed(wanted, spans), strict=True)
            self._chunks[key] = {process: chunks for process, chunks in needed if chunks}
        return self._chunks[key]

    def _assembled(self, name: str, arrays: Mapping[int, np.ndarray]) -> np.ndarray:
        """A tensor, of what was read of each process's."""
        dtype, shape = self.spec(name)
        return assembled(
            shape,
            dtype,
            {
                part: partial(array.__getitem__, slice(start, start + part.size))
                for process, array in arrays.items()
                for start, part in with_starts(self._by(name)[process])
            },
        )

    def _by(self, name: str) -> dict[int, list[Part]]:
        """The parts of a tensor that each process stores."""
        cut = self._cut[name]
        key = id(cut.layout), id(cut.owners)
        if key not in self._held:
            self._held[key] = cut.held
        return self._held[key]

    def _of(self, process: int) -> TensorFiles:
        """What a process has stored, by the names in its files."""
        with self._reading:
            if process not in self._opened:
                try:
                    self._opened[process] = self._open(process)
                except CheckpointError as error:
                    raise DamagedError(str(error)) from error
            return self._opened[process]

    def _open(self, process: int) -> TensorFiles:
        file, sha256 = self._tables[process]
        files = open_records(self._folder, read_records(self._folder / file, sha256))
        names = {stored_name(n, process) for n in self._cut if process in self._by(n)}
        different = names ^ files.keys()
        if different:
            name = format_name(min(different))
            raise CheckpointError(f"{file} lacks, or should lack, tensor {name}")
        for name in names:
            if files.spec(name) != self._stored_spec(name):
                raise CheckpointError(
                    f"tensor {format_name(name)} cannot be put together: its parts are of another "
                    "type, or not of their sizes"
                )
        return files


def stored_name(name: str, process: int) -> str:
    """The name in the files of what a process stores of a tensor."""
    return f"{name}@{process}"


def _taken_apart(stored: str) -> tuple[str, int]:
    """The tensor and the process of a `stored_name`."""
    name, _, process = stored.rpartition("@")
    return name, int(process)


# ---- who stores which ---------------------------------------------------------------------------
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
        """Tensors that this process stores, by name in the files; the arrays are the caller's."""
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
    """The key by which tensors with the same sharding share a layout: who stores which shard."""
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
