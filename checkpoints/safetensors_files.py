"""Safetensors files: read in ranges of bytes, written in little more memory than one file, and
SHA-256 digests of what they hold, chunk by chunk, so that a range can be checked on its own."""

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

from checkpoints.errors import CheckpointError, DamagedError
from files.atomic_writing import unwrap_os_errors
from files.formatting import format_name
from files.git_lfs import check_no_pointer
from files.temp_folders import fsync
from files.text_files import MEBIBYTE

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
"""Those that both safetensors and NumPy (with ml_dtypes) can hold, by safetensors' names."""
RESERVED_NAME = "__metadata__"  # of the format
MAX_HEADER = 16 * MEBIBYTE
"""Bytes of a safetensors file's header: of some 200,000 tensors, which a second reads."""
_MIN_CHUNK = MEBIBYTE  # bytes of a chunk
_MAX_CHUNKS = 32  # chunks of a tensor: its record grows with tensors, and not with their bytes


class TensorSpec(NamedTuple):
    """What a tensor is, without its values."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class OpenFile:
    """A file that is open to be read for as long as anybody has this."""

    def __init__(self, path: Path) -> None:
        """Open it. Raises OSError."""
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)


class Stored(NamedTuple):
    """A tensor in a file that stays open, so that deleting the file does not disturb.

    Attributes:
        name: of the tensor.
        start: where its elements begin in the file, bytes.
        kind: safetensors' name of its dtype.
    """

    name: str
    path: Path
    file: OpenFile
    start: int
    kind: str
    shape: tuple[int, ...]

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape. Raises CheckpointError for a dtype that NumPy lacks."""
        if self.kind not in DTYPES:
            raise CheckpointError(
                f"tensor {self.name} of {self.path} is {self.kind}, which is not supported; "
                f"there are: {', '.join(DTYPES)}"
            )
        return TensorSpec(DTYPES[self.kind], self.shape)

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the bytes of the tensor from `offset` on; several threads may.

        Raises:
            DamagedError: the file cannot be read, or has become shorter.
        """
        done = 0
        try:
            # Not mapped: what was read does not stay in the process's memory, and a file that is
            # cut short gives an error and not a bus error.
            while done < len(memory):
                place = self.start + offset + done
                count = os.preadv(self.file.number, [memory[done:]], place)
                if not count:
                    raise OSError("the file is cut short")
                done += count
        except OSError as error:
            reason = error.strerror or error
            raise DamagedError(
                f"cannot read tensor {self.name} of {self.path}: {reason}"
            ) from error


def tensors_in(path: Path) -> list[Stored]:
    """The tensors of a safetensors file.

    Raises:
        CheckpointError: it is missing, or damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    check_no_pointer(path)
    try:
        file = OpenFile(path)
        length = int.from_bytes(os.pread(file.number, 8, 0), "little")
        if length > MAX_HEADER:
            raise ValueError(f"its header has {length:,} bytes, more than {MAX_HEADER:,}")
        with safe_open(path, framework="np", backend="pread") as checked:
            names = list(checked.keys())
        header = json.loads(os.pread(file.number, length, 8))
        rows = {name: header[name] for name in names}
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return [
        Stored(name, path, file, 8 + length + row["data_offsets"][0], row["dtype"],
               tuple(row["shape"]))
        for name, row in rows.items()
    ]  # fmt: skip


# ---- writing ------------------------------------------------------------------------------------
def as_stored(name: str, tensor: np.ndarray) -> np.ndarray:
    """The tensor as an array in C order, without a copy if it is one.

    Raises:
        TypeError: for a dtype that cannot be stored.
        ValueError: for a name that cannot be.
    """
    array = np.asarray(tensor, order="C")
    if array.dtype not in DTYPES.values():
        supported = ", ".join(dtype.name for dtype in DTYPES.values())
        raise TypeError(f"tensor {name} is {array.dtype}, but can only be one of {supported}")
    if name == RESERVED_NAME or name.encode(errors="ignore").decode() != name:
        raise ValueError(f"no tensor can be named {format_name(name)} in a safetensors file")
    return array


def shards_of(
    tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    """Split named tensors, in their order, into dictionaries of at most `shard_bytes` bytes.

    A larger tensor has one for itself. Tensors are taken when their turn comes, and a dictionary is
    emptied when the next one is asked for: if arrays are made when they are taken, only one shard
    of them exists at a time.
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


def write_shard(
    path: Path, shard: dict[str, np.ndarray], metadata: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write a safetensors file that survives a loss of power, for all who read its folder.

    Raises:
        OSError: it cannot be written.
    """
    with unwrap_os_errors():
        # Readers in transformers ask for the framework; "pt" is the only one they all know.
        save_file(shard, path, metadata={"format": "pt", **metadata})
    # The library leaves it to its owner alone. A folder that was made here follows the umask,
    # which cannot be read without changing it for all threads.
    path.chmod(path.parent.stat().st_mode & 0o666)
    fsync(path)


# ---- digests ------------------------------------------------------------------------------------
def digest(array: np.ndarray) -> str:
    """SHA-256 of all elements in C order, as hexadecimal digits."""
    return digest_of_bytes(_content(array))


def digest_of_bytes(content: bytes | memoryview) -> str:
    """SHA-256 of a file's content, or a part of it, as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def chunk_digests(array: np.ndarray) -> list[str]:
    """Digests of an array's elements in C order, one for each chunk."""
    content = _content(array)
    each = chunk_bytes(len(content))
    return [digest_of_bytes(content[i : i + each]) for i in range(0, len(content), each)]


def chunk_bytes(nbytes: int) -> int:
    """Bytes of a chunk of a tensor of `nbytes`, a power of two; the last chunk has the rest."""
    return max(_MIN_CHUNK, 1 << (max(nbytes - 1, 0) // _MAX_CHUNKS).bit_length())


def chunk_count(nbytes: int) -> int:
    """Number of chunks of a tensor of `nbytes`."""
    return -(-nbytes // chunk_bytes(nbytes))


def _content(array: np.ndarray) -> memoryview:
    # As bytes, since bfloat16 does not support the buffer protocol.
    return np.asarray(array, order="C").reshape(-1).view(np.uint8).data
