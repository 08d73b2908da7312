"""Tensors that several processes have stored in parts, read without what nobody asks for.

The manifest says which process has stored which part. So a process that loads needs the tables of
those alone whose parts it reads, and their files: on a thousand hosts, a few of them each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from checkpoints.digests import Digests, chunk_bytes
from checkpoints.errors import CheckpointError, DamagedError
from checkpoints.layouts import Piece, pieces_of
from checkpoints.parts import Layout, Part
from checkpoints.stored import Stored, TensorSpec
from checkpoints.tables import Records, Table, stored_name
from checkpoints.tensor_files import TensorFiles
from files.shown import shown_name

Found = TypeVar("Found")


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
        found: dict[int, list[Part]] = {}
        for owner, part in zip(self.owners, self.layout, strict=True):
            found.setdefault(owner, []).append(part)
        return found


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
        self._folder, self._tables, self._cut = folder, tables, cut
        self._names = dict.fromkeys(cut)
        self._pieces = _Lazy(lambda: self._cut, self._pieces_of)
        self._files = _Lazy(self._stored_names, lambda name: self._find(name)[0])
        self._digests = _Lazy(self._stored_names, lambda name: self._find(name)[1])
        self._held: dict[tuple[int, int], dict[int, list[Part]]] = {}
        self._chunks: dict[tuple[object, ...], dict[int, tuple[int, ...]]] = {}
        self._reading = threading.Lock()
        self._opened: dict[int, dict[str, tuple[Stored, Digests]]] = {}

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

    def spec(self, name: str) -> TensorSpec:
        """As of `TensorFiles`; reads nothing."""
        cut = self._cut[name]
        return TensorSpec(cut.dtype, cut.layout[0].shape)

    def stored_spec(self, name: str) -> TensorSpec:
        """As of `TensorFiles`; reads nothing."""
        tensor, process = _taken_apart(name)
        size = sum(part.size for part in self._held_of(tensor)[process])
        return TensorSpec(self._cut[tensor].dtype, (size,))

    def _each(self, name: str) -> int:
        return chunk_bytes(self.stored_spec(name).nbytes)

    def _needed(self, name: str, wanted: tuple[Part, ...]) -> dict[str, tuple[int, ...]]:
        # On a thousand hosts a tensor has thousands of parts: tensors that are alike need alike.
        cut = self._cut[name]
        key = id(cut.layout), id(cut.owners), cut.dtype, wanted
        if key not in self._chunks:
            found = super()._needed(name, wanted).items()
            chunks = {_taken_apart(one)[1]: numbers for one, numbers in found if numbers}
            self._chunks[key] = chunks
        return {stored_name(name, process): n for process, n in self._chunks[key].items()}

    def _pieces_in(self, name: str, stored: Collection[str]) -> Iterator[Piece]:
        for one in stored:
            yield from pieces_of(one, self._held_of(name)[_taken_apart(one)[1]])

    def _held_of(self, name: str) -> dict[int, list[Part]]:
        cut = self._cut[name]
        key = id(cut.layout), id(cut.owners)
        if key not in self._held:
            self._held[key] = cut.held
        return self._held[key]

    def _pieces_of(self, name: str) -> list[Piece]:
        return [
            piece
            for process, parts in self._held_of(name).items()
            for piece in pieces_of(stored_name(name, process), parts)
        ]

    def _stored_names(self) -> list[str]:
        return [stored_name(name, process) for name in self._cut for process in self._held_of(name)]

    def _find(self, stored: str) -> tuple[Stored, Digests]:
        return self._of(_taken_apart(stored)[1])[stored]

    def _of(self, process: int) -> dict[str, tuple[Stored, Digests]]:
        """What a process has stored, by the names in its files."""
        with self._reading:
            if process not in self._opened:
                try:
                    self._opened[process] = self._open(process)
                except CheckpointError as error:
                    raise DamagedError(str(error)) from error
            return self._opened[process]

    def _open(self, process: int) -> dict[str, tuple[Stored, Digests]]:
        file, sha256 = self._tables[process]
        found = recorded(self._folder, Table.read(self._folder / file, sha256).tensors)
        names = [stored_name(n, process) for n in self._cut if process in self._held_of(n)]
        expected = {name: self.stored_spec(name) for name in names}
        different = expected.keys() ^ found.keys()
        if different:
            name = shown_name(min(different))
            raise CheckpointError(f"{file} lacks, or should lack, tensor {name}")
        for name, spec in expected.items():
            stored, digests = found[name]
            if stored.spec != spec or digests.each != self._each(name):
                raise CheckpointError(
                    f"tensor {shown_name(name)} cannot be put together: its parts are of another "
                    "type, or not of their sizes"
                )
        return found


def _taken_apart(stored: str) -> tuple[str, int]:
    """The tensor and the process of a `stored_name`."""
    name, _, process = stored.rpartition("@")
    return name, int(process)


class _Lazy(Mapping[str, Found], Generic[Found]):
    """Values that are found when they are asked for."""

    def __init__(self, names: Callable[[], Collection[str]], find: Callable[[str], Found]) -> None:
        self._names, self._find = names, find

    def __getitem__(self, name: str) -> Found:
        return self._find(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())


def recorded(folder: Path, records: Records) -> dict[str, tuple[Stored, Digests]]:
    """The tensors of records, and their digests, in files that have them and no other.

    Raises:
        CheckpointError: if a file or tensor is missing, too many, or of another kind.
    """
    digests = {name: record.digests(name) for name, record in records.items()}
    files = dict.fromkeys(record.file for record in records.values())
    tensors = TensorFiles([folder / file for file in files], digests)
    check_recorded(folder, tensors, records)
    return {name: (tensors._files[name], digests[name]) for name in records}


def check_recorded(folder: Path, tensors: TensorFiles, records: Records) -> None:
    """Raise CheckpointError unless the tensors in files are those of records."""
    different = tensors.stored ^ records.keys()
    if different:
        raise CheckpointError(f"{folder} lacks, or should lack, tensor {min(different)}")
    for name, record in records.items():
        dtype, shape = tensors.stored_spec(name)
        if (dtype.name, list(shape)) != (record.dtype, record.shape):
            raise CheckpointError(
                f"tensor {name} in {folder} is {dtype.name}{list(shape)}, "
                f"but was saved as {record.dtype}{record.shape}"
            )
