"""Tensors where they are in safetensors files, to be read in ranges of bytes."""

from __future__ import annotations

import json
import math
import os
import weakref
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints.errors import CheckpointError, DamagedError
from files.lfs import check_no_pointer
from files.text import MEBIBYTE

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


MAX_HEADER = 16 * MEBIBYTE
"""Bytes of a safetensors file's header: of some 200,000 tensors, which a second reads."""


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
