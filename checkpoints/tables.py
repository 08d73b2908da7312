"""What one process has stored of a step: a record of each tensor in its files.

A process alone has its records in the manifest. Of several, each writes a table, and the manifest
has the tables' digests: no file grows with the number of processes times the tensors.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np

from checkpoints.digests import Digests, digest_of_bytes
from checkpoints.errors import CheckpointError
from checkpoints.stored import DTYPES, TensorSpec
from files.errors import FileError
from files.json_files import Fields, parse_json
from files.shown import shown, shown_name, shown_path
from files.text import MEBIBYTE, decoded, read_bytes
from files.writing import write_synced

NAMED_DTYPES = {dtype.name: dtype for dtype in DTYPES.values()}
MAX_TABLE = 64 * MEBIBYTE
"""Bytes of a table, and of a manifest."""


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a safetensors file."""

    file: str
    """Name of the file it is in."""

    dtype: str
    """Name of its NumPy dtype."""

    shape: list[int]

    sha256: list[str]
    """Digests of its elements in C order, one for each chunk (`checkpoints.digests`)."""

    @classmethod
    def of(cls, array: np.ndarray, file: str) -> Self:
        """The record of an array that is in `file`."""
        digests = list(Digests.of_array(array).sha256)
        return cls(file, array.dtype.name, list(array.shape), digests)

    def digests(self, name: str) -> Digests:
        """The digests of the tensor `name`. Raises CheckpointError if they do not fit."""
        if self.dtype not in NAMED_DTYPES:
            raise CheckpointError(f"tensor {shown_name(name)} is of no type that can be stored")
        nbytes = TensorSpec(NAMED_DTYPES[self.dtype], tuple(self.shape)).nbytes
        recorded = Digests.saved(self.sha256, nbytes)
        if recorded is None:
            raise CheckpointError(
                f"tensor {shown_name(name)} has not as many digests as it has chunks"
            )
        return recorded

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """The record in a manifest or table. Raises FileError if it is none."""
        file = fields.text("file")
        if not is_file_name(file):
            raise FileError(f"{shown(file)} is no name of a file in a checkpoint")
        digests = fields.text_list("sha256")
        return cls(file, fields.text("dtype"), fields.counts("shape"), digests)


Records = dict[str, TensorRecord]


@dataclass(frozen=True)
class Table:
    """What one process has stored."""

    tensors: Records
    """By their names in the files."""

    def write(self, path: Path) -> str:
        """Write the table, and return its digest."""
        tensors = {name: asdict(record) for name, record in self.tensors.items()}
        return write_checked(path, json.dumps({"tensors": tensors}))

    @classmethod
    def read(cls, path: Path, sha256: str) -> Self:
        """The table in a file.

        Raises:
            CheckpointError: it is missing, damaged, or another than that of the digest.
        """
        try:
            content = read_bytes(path, MAX_TABLE)
            if digest_of_bytes(content) != sha256:
                raise CheckpointError(f"{shown_path(path)} is not what was saved")
            fields = Fields(parse_json(decoded(content, path, 1), path), shown_path(path))
            rows = fields.objects("tensors")
            return cls({name: TensorRecord.read(row) for name, row in rows.items()})
        except CheckpointError:
            raise
        except FileError as error:
            raise CheckpointError(f"{shown_path(path)} is damaged: {error}") from error


def stored_name(name: str, process: int) -> str:
    """The name in the files of what a process stores of a tensor."""
    return f"{name}@{process}"


def write_checked(path: Path, text: str) -> str:
    """Write a text that will be read through `MAX_TABLE`, and return its digest.

    Raises:
        CheckpointError: it is larger than what may be read.
    """
    content = text.encode()
    if len(content) > MAX_TABLE:
        raise CheckpointError(
            f"{shown_path(path)} would have {len(content):,} bytes, more than the {MAX_TABLE:,} "
            "that can be read: save with more processes"
        )
    write_synced(path, text)
    return digest_of_bytes(content)


def is_file_name(name: str) -> bool:
    """Whether it names a file in its folder, and nothing outside."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name
