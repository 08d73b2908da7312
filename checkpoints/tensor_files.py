"""Tensors in safetensors files by name, verified against SHA-256 hashes where these are recorded.

The manifest has the tensor records of a single process. Each of several processes writes a record
file, and the manifest has these files' digests, so that no file grows with processes times tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from checkpoints.errors import CheckpointError, DamagedCheckpointError
from checkpoints.lazy_arrays import LazyArrays
from checkpoints.safetensors_files import (
    DTYPES,
    ArraySpec,
    StoredTensor,
    chunk_bytes,
    chunk_count,
    read_header,
    sha256_of_bytes,
    sha256_of_chunks,
)
from checkpoints.tensor_shards import StoredShards, TensorShard, find_needed_chunks
from files.atomic_writing import write_synced
from files.errors import FileError
from files.formatting import format_name, format_path, format_value
from files.json_files import JsonObject, parse_json
from files.text_files import MEBIBYTE, decode_text, read_bytes

NAMED_DTYPES = {dtype.name: dtype for dtype in DTYPES.values()}
MAX_RECORDS = 64 * MEBIBYTE
"""Maximum bytes of a record file or manifest."""

# SHA-256 does about 1.2 GB/s on one core; more threads than this wait for the disk.
MAX_READERS = 4


@contextmanager
def get_reader_pool() -> Iterator[ThreadPoolExecutor]:
    """A context with a thread pool that reads and hashes files; cancels queued work at its end."""
    pool = ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def fingerprint_files(files: Iterable[Path]) -> str:
    """Return the SHA-256 (hex) of the files' names, sizes and first megabytes."""
    sha256 = hashlib.sha256()
    for path in sorted(files):
        with path.open("rb") as file:
            sha256.update(f"{path.name} {path.stat().st_size}\n".encode())
            sha256.update(file.read(2**20))
    return sha256.hexdigest()


class TensorFiles(LazyArrays):
    """Lazy mapping of the tensors in safetensors files; each access reads a new array from disk.

    The files stay open, so that they can be deleted meanwhile, as a running training does with old
    checkpoints.

    Attributes:
        missing: file name by tensor name, of tensors in the index that no file has.
    """

    def __init__(
        self,
        files: Iterable[Path],
        digests: Mapping[str, Sequence[str]] | None = None,
        skip: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Open `files`.

        Args:
            files: safetensors files with distinct tensor names.
            digests: digest of each chunk by tensor name, to verify values; None: do not verify.
            skip: returns True for the names of tensors to ignore.

        Raises:
            CheckpointError: a file is missing or damaged, or two files have the same tensor.
        """
        stored: dict[str, StoredTensor] = {}
        for path in files:
            for one in read_header(path):
                if skip(one.name):
                    continue
                if one.name in stored:
                    raise CheckpointError(
                        f"tensor {one.name} is in {stored[one.name].path} and also in {path.name}"
                    )
                stored[one.name] = one
        self._names = self._files = stored
        self._digests = digests
        self.missing: Mapping[str, str] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        """Read one tensor.

        Raises:
            KeyError: unknown name.
            DamagedCheckpointError: the tensor cannot be read, or does not match its digest.
        """
        return self._read(name)

    def read_shards(self, name: str, shards: Sequence[TensorShard]) -> np.ndarray:
        """Read only the chunks of a tensor that contain elements of `shards`; others are 0.

        Returns:
            The tensor in its full shape; elements outside of these chunks are 0.

        Raises:
            KeyError, DamagedCheckpointError: as for a full read.
        """
        full = TensorShard.full(self.spec(name).shape)
        stored = StoredShards(self._chunk_elements(name), ((0, full),))
        (chunks,) = find_needed_chunks(tuple(shards), (stored,))
        return self._read(name, chunks)

    def spec(self, name: str) -> ArraySpec:
        """Return dtype and shape of a tensor without reading it.

        Raises:
            KeyError: unknown name.
            CheckpointError: a dtype that NumPy lacks.
        """
        return self._stored_spec(name)

    def get_stored(self, name: str) -> tuple[StoredTensor, Sequence[str] | None]:
        """Return a tensor's location in its open file, and its recorded chunk hashes if any."""
        return self._files[name], self._digests[name] if self._digests is not None else None

    def _stored_spec(self, name: str) -> ArraySpec:
        """Return dtype and shape of a tensor, given by its name in the files."""
        return self._files[name].spec

    def _stored_names(self) -> Collection[str]:
        """Return the names of all tensors in the files."""
        return self._files

    def fingerprint(self) -> str:
        """Return a SHA-256 of file names, sizes and first megabytes, different for most models."""
        return fingerprint_files(self.paths)

    @property
    def paths(self) -> list[Path]:
        """The files, in order."""
        return sorted({one.path for one in self._files.values()})

    def verify(self, process: int = 0, num_processes: int = 1) -> None:
        """Read every tensor once and compare it with its recorded SHA-256.

        At most `MAX_READERS` chunks are in memory at a time.

        Args:
            process, num_processes: verify only this process's part of the chunks.

        Raises:
            DamagedCheckpointError: names the first tensor that is not the saved one.
        """

        def read(chunk: tuple[str, int]) -> None:
            name, number = chunk
            nbytes = self._stored_spec(name).nbytes
            size = chunk_bytes(nbytes)
            self._read_chunk(name, number, memoryview(bytearray(min(size, nbytes - number * size))))

        counts = {n: chunk_count(self._stored_spec(n).nbytes) for n in self._stored_names()}
        chunks = [(name, number) for name, count in counts.items() for number in range(count)]
        with get_reader_pool() as pool:
            for _ in pool.map(read, chunks[process::num_processes]):
                pass

    def _read(self, name: str, chunks: Iterable[int] | None = None) -> np.ndarray:
        """Read a tensor from the files; elements outside the given `chunks` are 0."""
        dtype, shape = spec = self._stored_spec(name)
        content, size = np.zeros(spec.nbytes, np.uint8), chunk_bytes(spec.nbytes)
        for number in range(chunk_count(spec.nbytes)) if chunks is None else chunks:
            self._read_chunk(name, number, content.data[number * size : (number + 1) * size])
        return content.view(dtype).reshape(shape)

    def _read_chunk(self, name: str, number: int, memory: memoryview) -> None:
        """Read a file chunk of a tensor into `memory` and verify its SHA-256."""
        stored, digests = self.get_stored(name)
        stored.read_into(memory, number * chunk_bytes(self._stored_spec(name).nbytes))
        if digests is not None and sha256_of_bytes(memory) != digests[number]:
            file = f"{stored.path.parent.name}/{stored.path.name}"
            raise DamagedCheckpointError(f"tensor {name} in {file} is not what was saved")

    def _chunk_elements(self, name: str) -> int:
        """Return the number of elements in a chunk of a stored tensor."""
        spec = self._stored_spec(name)
        return max(chunk_bytes(spec.nbytes) // spec.dtype.itemsize, 1)


# ---- records ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TensorRecord:
    """Manifest record of a stored tensor: file, dtype, shape and SHA-256 hashes of its chunks.

    Attributes:
        file: file name.
        dtype: NumPy's name of the dtype.
        sha256: digest of each chunk of the elements in C order.
    """

    file: str
    dtype: str
    shape: list[int]
    sha256: list[str]

    @classmethod
    def from_array(cls, array: np.ndarray, file: str) -> Self:
        """Create the manifest record of an array stored in `file`; computes the chunk hashes."""
        return cls(file, array.dtype.name, list(array.shape), sha256_of_chunks(array))

    def check(self, name: str) -> None:
        """Raise CheckpointError unless the tensor's manifest record has a hash for each chunk."""
        if self.dtype not in NAMED_DTYPES:
            raise CheckpointError(f"tensor {format_name(name)} has an unsupported dtype")
        nbytes = ArraySpec(NAMED_DTYPES[self.dtype], tuple(self.shape)).nbytes
        if len(self.sha256) != chunk_count(nbytes):
            raise CheckpointError(f"tensor {format_name(name)} lacks the digest of a chunk")

    @classmethod
    def from_json(cls, fields: JsonObject) -> Self:
        """Parse the manifest record of a tensor from JSON; raises FileError if it is invalid."""
        file = fields.get_text("file")
        if not is_file_name(file):
            raise FileError(f"{format_value(file)} is not a file name of a checkpoint")
        digests = fields.get_texts("sha256")
        return cls(file, fields.get_text("dtype"), fields.get_counts("shape"), digests)


TensorRecords = dict[str, TensorRecord]


def open_recorded_tensors(folder: Path, records: TensorRecords) -> TensorFiles:
    """Open tensor files after checking that they contain exactly the tensors in the records.

    Raises:
        CheckpointError: a file or tensor is missing, unexpected, or has another dtype or shape.
    """
    for name, record in records.items():
        record.check(name)
    files = dict.fromkeys(folder / record.file for record in records.values())
    tensors = TensorFiles(files, {name: record.sha256 for name, record in records.items()})
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


def records_to_json(records: TensorRecords) -> dict[str, Any]:
    """Convert manifest records of tensors to JSON data."""
    return {name: asdict(record) for name, record in records.items()}


def write_records(path: Path, records: TensorRecords) -> str:
    """Write manifest records of tensors to a JSON file; returns the file's SHA-256."""
    return write_size_checked(path, json.dumps({"tensors": records_to_json(records)}))


def records_from_json(fields: JsonObject) -> TensorRecords:
    """Parse manifest records of tensors from JSON; raises FileError if they are invalid."""
    return {
        name: TensorRecord.from_json(record)
        for name, record in fields.get_objects("tensors").items()
    }


def read_records(path: Path, sha256: str) -> TensorRecords:
    """Read a JSON file of manifest records of tensors, and verify the file's SHA-256.

    Raises:
        CheckpointError: the file is missing or damaged, or does not match the digest.
    """
    try:
        content = read_bytes(path, MAX_RECORDS)
        if sha256_of_bytes(content) != sha256:
            raise CheckpointError(f"{format_path(path)} is not what was saved")
        return records_from_json(
            JsonObject(parse_json(decode_text(content, path), path), format_path(path))
        )
    except CheckpointError:
        raise
    except FileError as error:
        raise CheckpointError(f"{format_path(path)} is damaged: {error}") from error


def write_size_checked(path: Path, text: str) -> str:
    """Write a text of at most `MAX_RECORDS` bytes and return its SHA-256.

    Raises:
        CheckpointError: the text is larger.
    """
    content = text.encode()
    if len(content) > MAX_RECORDS:
        raise CheckpointError(
            f"{format_path(path)} would have {len(content):,} bytes, more than the {MAX_RECORDS:,} "
            "that can be read: save with more processes"
        )
    write_synced(path, text)
    return sha256_of_bytes(content)


def is_file_name(name: str) -> bool:
    """True if the name is a plain file name, without a path."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name
