"""Tensors that several processes have stored in parts, read without what nobody asks for.

The manifest says which process has stored which part. So a process that loads needs the tables of
those alone whose parts it reads, and their files: on a thousand hosts, a few of them each.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from checkpoints.digests import Digests
from checkpoints.errors import CheckpointError, DamagedError
from checkpoints.parts import Layout, Part, assembled, with_starts
from checkpoints.ranges import StoredParts, chunks_needed
from checkpoints.stored import Stored, TensorSpec
from checkpoints.tables import Records, Table, stored_name
from checkpoints.tensor_files import TensorFiles
from files.shown import shown_name


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

    def opened(self, name: str) -> tuple[Stored, Digests | None]:
        """As of `TensorFiles`; reads the table of who stored it, if nobody has done so."""
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
                StoredParts(self._elements(stored_name(name, process)), tuple(with_starts(parts)))
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
        files = tensors_of(self._folder, Table.read(self._folder / file, sha256).tensors)
        names = {stored_name(n, process) for n in self._cut if process in self._by(n)}
        different = names ^ files.keys()
        if different:
            name = shown_name(min(different))
            raise CheckpointError(f"{file} lacks, or should lack, tensor {name}")
        for name in names:
            if files.spec(name) != self._stored_spec(name):
                raise CheckpointError(
                    f"tensor {shown_name(name)} cannot be put together: its parts are of another "
                    "type, or not of their sizes"
                )
        return files


def _taken_apart(stored: str) -> tuple[str, int]:
    """The tensor and the process of a `stored_name`."""
    name, _, process = stored.rpartition("@")
    return name, int(process)


def tensors_of(folder: Path, records: Records) -> TensorFiles:
    """The tensors of records, in files that have them and no other.

    Raises:
        CheckpointError: if a file or tensor is missing, too many, or of another kind.
    """
    files = dict.fromkeys(record.file for record in records.values())
    digests = {name: record.digests(name) for name, record in records.items()}
    tensors = TensorFiles([folder / file for file in files], digests)
    different = tensors.keys() ^ records.keys()
    if different:
        raise CheckpointError(f"{folder} lacks, or should lack, tensor {min(different)}")
    for name, record in records.items():
        dtype, shape = tensors.spec(name)
        if (dtype.name, list(shape)) != (record.dtype, record.shape):
            raise CheckpointError(
                f"tensor {name} in {folder} is {dtype.name}{list(shape)}, "
                f"but was saved as {record.dtype}{record.shape}"
            )
    return tensors
