"""Read tensors whose shards several processes stored in different files.

The manifest has the process that stored each shard. A loading process therefore opens the record
and tensor files of only those processes that stored a shard it needs: a few of a thousand hosts.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from checkpoints.errors import CheckpointError, DamagedCheckpointError
from checkpoints.safetensors_files import ArraySpec, StoredTensor
from checkpoints.tensor_files import TensorFiles, open_recorded_tensors, read_records
from checkpoints.tensor_shards import (
    ShardLayout,
    StoredShards,
    TensorShard,
    assemble_tensor,
    find_needed_chunks,
    iter_with_offsets,
)
from files.formatting import format_name


class ShardedTensorSpec(NamedTuple):
    """Dtype of a stored tensor, and its shards with the processes that stored them.

    Attributes:
        layout: the shards; tensors with the same sharding share one object.
        owners: the process that stored each shard; tensors with equal owners share one object.
    """

    dtype: np.dtype
    layout: ShardLayout
    owners: Sequence[int]

    def shards_by_process(self) -> dict[int, list[TensorShard]]:
        """Return the shards of the tensor that each process stored, in the order of its file."""
        by_process: dict[int, list[TensorShard]] = {}
        for owner, shard in zip(self.owners, self.layout, strict=True):
            by_process.setdefault(owner, []).append(shard)
        return by_process


class ShardedTensorFiles(TensorFiles):
    """Lazy mapping of a step's tensors whose shards several processes stored.

    The files of a process are opened, and its record file is read, on the first access to a shard
    that it stored, by any thread. A damaged file raises DamagedCheckpointError then.
    """

    def __init__(
        self,
        folder: Path,
        record_files: Sequence[tuple[str, str]],
        sharded: Mapping[str, ShardedTensorSpec],
    ) -> None:
        """Open nothing yet.

        Args:
            record_files: name and SHA-256 of each process's record file.
            sharded: the tensors by name.
        """
        super().__init__(())
        self._names = self._sharded = sharded
        self._folder, self._record_files = folder, record_files
        self._by_process: dict[tuple[int, int], dict[int, list[TensorShard]]] = {}
        self._chunks: dict[tuple[object, ...], dict[int, tuple[int, ...]]] = {}
        self._lock = threading.Lock()
        self._process_files: dict[int, TensorFiles] = {}

    def open_all(self) -> None:
        """Open the files of all processes, so that reads survive their deletion.

        Raises:
            DamagedCheckpointError: a file is missing, damaged, or not the one of the manifest.
        """
        for process in range(len(self._record_files)):
            self._files_of_process(process)

    def __getitem__(self, name: str) -> np.ndarray:
        processes = self._shards_by_process(name)
        return self._assemble(name, {p: self._read(stored_name(name, p)) for p in processes})

    def read_shards(self, name: str, shards: Sequence[TensorShard]) -> np.ndarray:
        needed = self._needed_chunks(name, tuple(shards)).items()
        return self._assemble(name, {p: self._read(stored_name(name, p), n) for p, n in needed})

    def spec(self, name: str) -> ArraySpec:
        tensor = self._sharded[name]
        return ArraySpec(tensor.dtype, tensor.layout[0].shape)

    def get_stored(self, name: str) -> tuple[StoredTensor, Sequence[str] | None]:
        return self._files_of_process(_split_stored_name(name)[1]).get_stored(name)

    def _stored_spec(self, name: str) -> ArraySpec:
        tensor, process = _split_stored_name(name)
        length = sum(shard.length for shard in self._shards_by_process(tensor)[process])
        return ArraySpec(self._sharded[tensor].dtype, (length,))

    def _stored_names(self) -> list[str]:
        return [
            stored_name(name, process)
            for name in self._sharded
            for process in self._shards_by_process(name)
        ]

    def _needed_chunks(
        self, name: str, required: tuple[TensorShard, ...]
    ) -> dict[int, tuple[int, ...]]:
        """Return the chunk numbers, by process, that contain elements of the `required` shards."""
        # On a thousand hosts a tensor has thousands of shards, so tensors with the same sharding
        # share the result.
        tensor = self._sharded[name]
        key = id(tensor.layout), id(tensor.owners), tensor.dtype, required
        if key not in self._chunks:
            by_process = self._shards_by_process(name)
            stored = tuple(
                StoredShards(
                    self._chunk_elements(stored_name(name, process)),
                    tuple(iter_with_offsets(shards)),
                )
                for process, shards in by_process.items()
            )
            needed = zip(by_process, find_needed_chunks(required, stored), strict=True)
            self._chunks[key] = {process: chunks for process, chunks in needed if chunks}
        return self._chunks[key]

    def _assemble(self, name: str, arrays: Mapping[int, np.ndarray]) -> np.ndarray:
        """Assemble a full tensor from the arrays in which each process stored its shards."""
        dtype, shape = self.spec(name)
        by_process = self._shards_by_process(name)
        return assemble_tensor(
            shape,
            dtype,
            {
                shard: partial(array.__getitem__, slice(offset, offset + shard.length))
                for process, array in arrays.items()
                for offset, shard in iter_with_offsets(by_process[process])
            },
        )

    def _shards_by_process(self, name: str) -> dict[int, list[TensorShard]]:
        """Return the shards of a tensor that each process stored; cached for equal shardings."""
        tensor = self._sharded[name]
        key = id(tensor.layout), id(tensor.owners)
        if key not in self._by_process:
            self._by_process[key] = tensor.shards_by_process()
        return self._by_process[key]

    def _files_of_process(self, process: int) -> TensorFiles:
        """Return the open tensor files that a process stored; opens them on first use."""
        with self._lock:
            if process not in self._process_files:
                try:
                    self._process_files[process] = self._open_process_files(process)
                except CheckpointError as error:
                    raise DamagedCheckpointError(str(error)) from error
            return self._process_files[process]

    def _open_process_files(self, process: int) -> TensorFiles:
        file, sha256 = self._record_files[process]
        files = open_recorded_tensors(self._folder, read_records(self._folder / file, sha256))
        names = {
            stored_name(name, process)
            for name in self._sharded
            if process in self._shards_by_process(name)
        }
        if different := names ^ files.keys():
            name = format_name(min(different))
            raise CheckpointError(f"{file} lacks, or should lack, tensor {name}")
        for name in names:
            if files.spec(name) != self._stored_spec(name):
                raise CheckpointError(
                    f"tensor {format_name(name)} cannot be assembled: its shards have another "
                    "dtype or other sizes"
                )
        return files


def stored_name(name: str, process: int) -> str:
    """Return the name `<name>@<process>` under which a process stores its shards of a tensor."""
    return f"{name}@{process}"


def _split_stored_name(stored: str) -> tuple[str, int]:
    name, _, process = stored.rpartition("@")
    return name, int(process)
