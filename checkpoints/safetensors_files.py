"""Safetensors files: byte-range reads, writes of whole files, and SHA-256 of chunks.

Each chunk has a digest of its own, so that a range can be verified without reading all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from checkpoints.errors import CheckpointError, DamagedCheckpointError
from files.atomic_writing import unwrap_os_errors
from files.formatting import format_name
from files.temp_folders import fsync
from files.text_files import MEBIBYTE, check_not_lfs_pointer

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Dtypes that both safetensors and NumPy (with ml_dtypes) have, by safetensors' names."""
RESERVED_NAME = "__metadata__"  # of the format
MAX_HEADER = 16 * MEBIBYTE
"""Maximum bytes of a safetensors header: about 200,000 tensors, parsed within a second."""
_MIN_CHUNK = MEBIBYTE  # bytes of a chunk
_MAX_CHUNKS = 32  # per tensor, so that records do not grow with the tensors' bytes


class ArraySpec(NamedTuple):
    """Dtype and shape of an array."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class OpenFile:
    """File descriptor for reading, closed when the object is garbage-collected."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises OSError."""
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)


class StoredTensor(NamedTuple):
    """A tensor in an open safetensors file; the file can be deleted meanwhile.

    Attributes:
        start: byte offset of its elements in the file.
        dtype_name: safetensors' name of its dtype.
    """

    name: str
    path: Path
    file: OpenFile
    start: int
    dtype_name: str
    shape: tuple[int, ...]

    @property
    def spec(self) -> ArraySpec:
        """Dtype and shape of the tensor; raises CheckpointError for a dtype that NumPy lacks."""
        if self.dtype_name not in DTYPES:
            raise CheckpointError(
                f"tensor {self.name} of {self.path} is {self.dtype_name}, which is not supported; "
                f"there are: {', '.join(DTYPES)}"
            )
        return ArraySpec(DTYPES[self.dtype_name], self.shape)

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the tensor's bytes, from byte `offset` on; thread-safe.

        Raises:
            DamagedCheckpointError: the file cannot be read, or was truncated.
        """
        done = 0
        try:
            # Not memory-mapped: mapped pages would count as memory of the process, and reading a
            # truncated file would be a bus error.
            while done < len(memory):
                position = self.start + offset + done
                count = os.preadv(self.file.descriptor, [memory[done:]], position)
                if not count:
                    raise OSError("the file is truncated")
                done += count
        except OSError as error:
            reason = error.strerror or error
            raise DamagedCheckpointError(
                f"cannot read tensor {self.name} of {self.path}: {reason}"
            ) from error


def read_header(path: Path) -> list[StoredTensor]:
    """Read the header of a safetensors file; returns its tensors.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    check_not_lfs_pointer(path)
    try:
        file = OpenFile(path)
        length = int.from_bytes(os.pread(file.descriptor, 8, 0), "little")
        if length > MAX_HEADER:
            raise ValueError(f"its header has {length:,} bytes, more than {MAX_HEADER:,}")
        with safe_open(path, framework="np", backend="pread") as checked:
            names = list(checked.keys())
        header = json.loads(os.pread(file.descriptor, length, 8))
        entries = {name: header[name] for name in names}
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return [
        StoredTensor(name, path, file, 8 + length + entry["data_offsets"][0], entry["dtype"],
                     tuple(entry["shape"]))
        for name, entry in entries.items()
    ]  # fmt: skip


# ---- writing ------------------------------------------------------------------------------------
def to_c_order(name: str, tensor: np.ndarray) -> np.ndarray:
    """Return the tensor as an array in C order, without a copy if it already is one.

    Raises:
        TypeError: unsupported dtype.
        ValueError: unsupported name.
    """
    array = np.asarray(tensor, order="C")
    if array.dtype not in DTYPES.values():
        supported = ", ".join(dtype.name for dtype in DTYPES.values())
        raise TypeError(f"tensor {name} is {array.dtype}, but can only be one of {supported}")
    if name == RESERVED_NAME or name.encode(errors="ignore").decode() != name:
        raise ValueError(f"no tensor can be named {format_name(name)} in a safetensors file")
    return array


def split_by_bytes(
    tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    """Group consecutive tensors into dictionaries of at most `shard_bytes` bytes each.

    A larger tensor has a dictionary of its own. A dictionary is cleared before the next one is
    filled, so that only one of them is in memory if `tensors` computes arrays lazily.
    """
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, array in tensors:
        if shard and size + array.nbytes > shard_bytes:
            yield shard
            shard.clear()
            size = 0
        shard[name] = array
        size += array.nbytes
    if shard:
        yield shard


def write_safetensors(
    path: Path, shard: dict[str, np.ndarray], metadata: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write and fsync a safetensors file, with the read and write permissions of its folder.

    Raises:
        OSError: the file cannot be written.
    """
    with unwrap_os_errors():
        # transformers requires a framework in the metadata; all of its loaders accept "pt".
        save_file(shard, path, metadata={"format": "pt", **metadata})
    # safetensors creates files that only the owner can read. The folder has the permissions of the
    # umask, which itself cannot be read without changing it for all threads.
    path.chmod(path.parent.stat().st_mode & 0o666)
    fsync(path)


# ---- digests ------------------------------------------------------------------------------------
def sha256_of_array(array: np.ndarray) -> str:
    """Return the SHA-256 (hex) of an array's elements in C order."""
    return sha256_of_bytes(_array_bytes(array))


def sha256_of_bytes(content: bytes | memoryview) -> str:
    """Return the SHA-256 (hex) of bytes."""
    return hashlib.sha256(content).hexdigest()


def sha256_of_chunks(array: np.ndarray) -> list[str]:
    """Return the SHA-256 (hex) of each chunk of an array's elements in C order."""
    content = _array_bytes(array)
    size = chunk_bytes(len(content))
    return [sha256_of_bytes(content[i : i + size]) for i in range(0, len(content), size)]


def chunk_bytes(nbytes: int) -> int:
    """Return the size of the chunks of a tensor that are hashed separately: a power of two."""
    return max(_MIN_CHUNK, 1 << (max(nbytes - 1, 0) // _MAX_CHUNKS).bit_length())


def chunk_count(nbytes: int) -> int:
    """Return the number of chunks of a tensor of `nbytes` bytes that are hashed separately."""
    return -(-nbytes // chunk_bytes(nbytes))


def _array_bytes(array: np.ndarray) -> memoryview:
    """Return the bytes of an array in C order; without a copy if it is contiguous."""
    # As bytes, since bfloat16 does not support the buffer protocol.
    return np.asarray(array, order="C").reshape(-1).view(np.uint8).data
