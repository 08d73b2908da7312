"""Tensors in safetensors files by name, checked against the records of a checkpoint where there are
any.

A process alone has its records in the manifest. Of several, each writes a file of records, and the
manifest has the files' digests: no file grows with the number of processes times the tensors.
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

from checkpoints.arrays import LazyArrays
from checkpoints.errors import CheckpointError, DamagedError
from checkpoints.safetensors_files import (
    DTYPES,
    Stored,
    TensorSpec,
    chunk_bytes,
    chunk_count,
    chunk_digests,
    digest_of_bytes,
    tensors_in,
)
from checkpoints.tensor_shards import Part, StoredParts, chunks_needed
from files.atomic_writing import write_synced
from files.errors import FileError
from files.formatting import format_name, format_path, format_value
from files.json_files import JsonObject, parse_json
from files.text_files import MEBIBYTE, decode_text, read_bytes

NAMED_DTYPES = {dtype.name: dtype for dtype in DTYPES.values()}
MAX_RECORDS = 64 * MEBIBYTE
"""Bytes of a file of records, and of a manifest."""

# SHA-256 does about 1.2 GB/s on one core; more threads than this wait for the disk.
MAX_READERS = 4


@contextmanager
def readers() -> Iterator[ThreadPoolExecutor]:
    """Threads to read and digest with; what they have not begun when the context ends is left."""
    pool = ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def fingerprint_of(files: Iterable[Path]) -> str:
    """A digest of files' names, sizes and first megabytes."""
    sha256 = hashlib.sha256()
    for path in sorted(files):
        with path.open("rb") as file:
            sha256.update(f"{path.name} {path.stat().st_size}\n".encode())
            sha256.update(file.read(2**20))
    return sha256.hexdigest()


class TensorFiles(LazyArrays):
    """The tensors of some safetensors files by name; each access reads one from disk.

    The files are opened at once and stay open, so that deleting them (as a running training does
    with old checkpoints) does not disturb. An array that was read belongs to the caller.

    Attributes:
        absent: the file of each tensor that an index names and no file has.
    """

    def __init__(
        self,
        files: Iterable[Path],
        digests: Mapping[str, Sequence[str]] | None = None,
        skipped: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Open `files`.

        Args:
            files: safetensors files without a tensor's name in common.
            digests: of the chunks of every tensor in them; reading another value is then an error.
            skipped: whether the tensor of a name is passed over, whatever its type and shape.

        Raises:
            CheckpointError: if a file is missing or damaged, or names do not fit.
        """
        stored: dict[str, Stored] = {}
        for path in files:
            for one in tensors_in(path):
                if skipped(one.name):
                    continue
                if one.name in stored:
                    raise CheckpointError(
                        f"tensor {one.name} is in {stored[one.name].path} and also in {path.name}"
                    )
                stored[one.name] = one
        self._names = self._files = stored
        self._digests = digests
        self.absent: Mapping[str, str] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        """Read one tensor.

        Raises:
            KeyError: if there is none of that name.
            DamagedError: if it cannot be read, or is not what its digest says.
        """
        return self._read(name)

    def some(self, name: str, wanted: Sequence[Part]) -> np.ndarray:
        """Read of one tensor the chunks that have the elements of the parts `wanted`.

        Returns:
            The tensor; elements outside of these chunks are 0.

        Raises:
            KeyError, DamagedError: as when all of it is read.
        """
        span = StoredParts(self._chunk_elements(name), ((0, Part.full(self.spec(name).shape)),))
        (chunks,) = chunks_needed(tuple(wanted), (span,))
        return self._read(name, chunks)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of a tensor, without reading it.

        Raises:
            KeyError: if there is none of that name.
            CheckpointError: for a dtype that NumPy lacks.
        """
        return self._stored_spec(name)

    def opened(self, name: str) -> tuple[Stored, Sequence[str] | None]:
        """What is stored under a name in the files, and its digests if there are any."""
        return self._files[name], self._digests[name] if self._digests is not None else None

    def _stored_spec(self, name: str) -> TensorSpec:
        """Dtype and shape of what is stored under a name in the files."""
        return self._files[name].spec

    def _stored_names(self) -> Collection[str]:
        """The names in the files."""
        return self._files

    def fingerprint(self) -> str:
        """A digest of the files' sizes and first megabytes, which tells most models apart."""
        return fingerprint_of({one.path for one in self._files.values()})

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Read every tensor once, in order to compare it with its digests.

        No more chunks than `MAX_READERS` are in memory at a time.

        Args:
            part, parts: read only the chunks of one of so many parts.

        Raises:
            DamagedError: about the first that is not what was saved.
        """

        def read(chunk: tuple[str, int]) -> None:
            name, number = chunk
            nbytes = self._stored_spec(name).nbytes
            each = chunk_bytes(nbytes)
            self._read_chunk(name, number, memoryview(bytearray(min(each, nbytes - number * each))))

        counts = {n: chunk_count(self._stored_spec(n).nbytes) for n in self._stored_names()}
        chunks = [(name, number) for name, count in counts.items() for number in range(count)]
        with readers() as pool:
            for _ in pool.map(read, chunks[part::parts]):
                pass

    def _read(self, name: str, chunks: Iterable[int] | None = None) -> np.ndarray:
        """A tensor in the files; elements outside of the chunks, if these are given, are 0."""
        dtype, shape = spec = self._stored_spec(name)
        content, each = np.zeros(spec.nbytes, np.uint8), chunk_bytes(spec.nbytes)
        for number in range(chunk_count(spec.nbytes)) if chunks is None else chunks:
            self._read_chunk(name, number, content.data[number * each : (number + 1) * each])
        return content.view(dtype).reshape(shape)

    def _read_chunk(self, name: str, number: int, memory: memoryview) -> None:
        """Read a chunk, and compare it with its digest."""
        stored, digests = self.opened(name)
        stored.read_into(memory, number * chunk_bytes(self._stored_spec(name).nbytes))
        if digests is not None and digest_of_bytes(memory) != digests[number]:
            file = f"{stored.path.parent.name}/{stored.path.name}"
            raise DamagedError(f"tensor {name} in {file} is not what was saved")

    def _chunk_elements(self, name: str) -> int:
        """Elements of a chunk of what is stored under a name."""
        spec = self._stored_spec(name)
        return max(chunk_bytes(spec.nbytes) // spec.dtype.itemsize, 1)


# ---- records ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a safetensors file.

    Attributes:
        file: name of the file.
        dtype: NumPy's name of it.
        sha256: digests of the elements in C order, one for each chunk.
    """

    file: str
    dtype: str
    shape: list[int]
    sha256: list[str]

    @classmethod
    def of(cls, array: np.ndarray, file: str) -> Self:
        """The record of an array that is in `file`."""
        return cls(file, array.dtype.name, list(array.shape), chunk_digests(array))

    def check(self, name: str) -> None:
        """Raise CheckpointError unless there is a digest for each chunk of the tensor `name`."""
        if self.dtype not in NAMED_DTYPES:
            raise CheckpointError(f"tensor {format_name(name)} is of no type that can be stored")
        nbytes = TensorSpec(NAMED_DTYPES[self.dtype], tuple(self.shape)).nbytes
        if len(self.sha256) != chunk_count(nbytes):
            raise CheckpointError(
                f"tensor {format_name(name)} has not as many digests as it has chunks"
            )

    @classmethod
    def read(cls, fields: JsonObject) -> Self:
        """The record in a file. Raises FileError if it is none."""
        file = fields.text("file")
        if not is_file_name(file):
            raise FileError(f"{format_value(file)} is no name of a file in a checkpoint")
        digests = fields.text_list("sha256")
        return cls(file, fields.text("dtype"), fields.counts("shape"), digests)


Records = dict[str, TensorRecord]


def open_records(folder: Path, records: Records) -> TensorFiles:
    """The tensors of records, in files that have them and no other.

    Raises:
        CheckpointError: if a file or tensor is missing, too many, or of another kind.
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


def records_data(records: Records) -> dict[str, Any]:
    """Records as data for JSON."""
    return {name: asdict(record) for name, record in records.items()}


def write_records(path: Path, records: Records) -> str:
    """Write a file of records, and return its digest."""
    return write_checked(path, json.dumps({"tensors": records_data(records)}))


def records_in(fields: JsonObject) -> Records:
    """The records in a manifest or a file of records. Raises FileError if they are none."""
    return {name: TensorRecord.read(row) for name, row in fields.objects("tensors").items()}


def read_records(path: Path, sha256: str) -> Records:
    """The records in a file.

    Raises:
        CheckpointError: it is missing, damaged, or another than that of the digest.
    """
    try:
        content = read_bytes(path, MAX_RECORDS)
        if digest_of_bytes(content) != sha256:
            raise CheckpointError(f"{format_path(path)} is not what was saved")
        return records_in(
            JsonObject(parse_json(decode_text(content, path), path), format_path(path))
        )
    except CheckpointError:
        raise
    except FileError as error:
        raise CheckpointError(f"{format_path(path)} is damaged: {error}") from error


def write_checked(path: Path, text: str) -> str:
    """Write a text that will be read through `MAX_RECORDS`, and return its digest.

    Raises:
        CheckpointError: it is larger than what may be read.
    """
    content = text.encode()
    if len(content) > MAX_RECORDS:
        raise CheckpointError(
            f"{format_path(path)} would have {len(content):,} bytes, more than the {MAX_RECORDS:,} "
            "that can be read: save with more processes"
        )
    write_synced(path, text)
    return digest_of_bytes(content)


def is_file_name(name: str) -> bool:
    """True if a name is that of a file in its folder, and of nothing outside."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name
