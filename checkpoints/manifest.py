"""The manifest of a checkpoint: what must be in its files. A step is complete only with it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from checkpoints.errors import CheckpointError, NewerFormatError
from checkpoints.parts import Part
from checkpoints.shards import write_json
from checkpoints.tensor_files import TensorFiles, digest
from files.errors import FileError
from files.json_files import Fields, read_object
from files.shown import shown, shown_path
from files.text import MEBIBYTE, read_bytes

FILE_NAME = "manifest.json"
MOST_TEXT = MEBIBYTE
FORMAT = 3
"""1 had no texts, 2 no tensors in parts."""


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a checkpoint."""

    file: str
    """Name of the safetensors file it is in."""

    dtype: str
    """Name of its NumPy dtype."""

    shape: list[int]

    sha256: str
    """Digest of its elements in C order."""

    @classmethod
    def of(cls, array: np.ndarray, file: str) -> Self:
        """The record of an array that is in `file`."""
        return cls(file, array.dtype.name, list(array.shape), digest(array))

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """The record in a manifest. Raises FileError if it is none."""
        file = fields.text("file")
        if not is_file_name(file):
            raise FileError(f"{shown(file)} is no name of a file in a checkpoint")
        return cls(file, fields.text("dtype"), fields.counts("shape"), fields.text("sha256"))


Parts = dict[str, Part]
"""The parts of a tensor, by the names under which the files have them."""


def _read_parts(fields: Fields) -> Parts:
    """The parts of a tensor in a manifest. Raises FileError if they are none."""
    shape = tuple(fields.counts("shape"))
    found = {}
    for name, part in fields.objects("parts").items():
        axes, corner, box = (tuple(part.counts(what)) for what in ("axes", "corner", "box"))
        if sorted(axes) != list(range(len(shape))) or not len(corner) == len(box) == len(shape):
            raise FileError(f"{shown(name)} is no part of a tensor of shape {shape}")
        found[name] = Part(shape, axes, corner, box, part.count("start"), part.count("size"))
    if not found:
        raise FileError("a tensor has no parts")
    return found


@dataclass(frozen=True)
class Manifest:
    """Everything about a step but the tensors' values."""

    step: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorRecord]
    texts: dict[str, str] = field(default_factory=dict)
    """Text files beside the tensors, such as config.yml: name to SHA-256 of the content."""

    parts: dict[str, Parts] = field(default_factory=dict)
    """Tensors that are stored in parts, which are among `tensors`."""

    def write(self, folder: Path) -> None:
        """Write the manifest, with a digest of itself, into the step's folder."""
        content = {"format": FORMAT, **asdict(self)}
        content["parts"] = {name: _parts_data(parts) for name, parts in self.parts.items()}
        write_json(folder / FILE_NAME, {"sha256": _digest(content), "content": content})

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest in a step's folder.

        Raises:
            NewerFormatError: a later version of this wrote it.
            CheckpointError: it is missing or damaged.
        """
        path = folder / FILE_NAME
        if not path.exists():
            raise CheckpointError(f"{shown_path(path)} is missing")
        try:
            whole = read_object(path)
            if whole.text("sha256") != _digest(whole.mapping("content")):
                raise CheckpointError(f"{shown_path(path)} is not what was saved")
            return cls._of(whole.object("content"), path)
        except CheckpointError:
            raise
        except FileError as error:
            raise CheckpointError(f"{FILE_NAME} is damaged: {error}") from error

    @classmethod
    def _of(cls, content: Fields, path: Path) -> Self:
        written = content.count("format")
        if written > FORMAT:
            raise NewerFormatError(
                f"{shown_path(path)} has format {written}, newer than the {FORMAT} that this "
                "version reads: use the version that wrote it"
            )
        tensors = {n: TensorRecord.read(row) for n, row in content.objects("tensors").items()}
        texts = content.texts("texts") if written > 1 else {}
        if not all(map(is_file_name, texts)):
            raise FileError(f"{shown_path(path)} names texts that are no files of the checkpoint")
        in_parts = content.objects("parts") if written > 2 else {}
        parts = {name: _read_parts(row) for name, row in in_parts.items()}
        return cls(content.count("step"), content.mapping("metadata"), tensors, texts, parts)

    def check_texts(self, folder: Path) -> None:
        """Raise CheckpointError unless every text file is as it was saved."""
        for name, saved in self.texts.items():
            try:
                found = text_digest(read_bytes(folder / name, MOST_TEXT))
            except FileError as error:
                raise CheckpointError(str(error)) from error
            if found != saved:
                raise CheckpointError(f"{shown_path(folder / name)} is not what was saved")

    def open(self, folder: Path) -> TensorFiles:
        """The tensors in a step's folder, after a check of everything but their values.

        Raises:
            CheckpointError: if a file or tensor is missing, too many, or of another kind.
        """
        files = dict.fromkeys(record.file for record in self.tensors.values())
        digests = {name: record.sha256 for name, record in self.tensors.items()}
        tensors = TensorFiles([folder / file for file in files], digests, self.parts)
        different = tensors.stored ^ self.tensors.keys()
        if different:
            raise CheckpointError(f"{folder} lacks, or should lack, tensor {min(different)}")
        for name, record in self.tensors.items():
            dtype, shape = tensors.stored_spec(name)
            if (dtype.name, list(shape)) != (record.dtype, record.shape):
                raise CheckpointError(
                    f"tensor {name} in {folder} is {dtype.name}{list(shape)}, "
                    f"but was saved as {record.dtype}{record.shape}"
                )
        return tensors


def _parts_data(parts: Parts) -> dict[str, Any]:
    rows = {name: asdict(part) for name, part in parts.items()}
    shapes = [row.pop("shape") for row in rows.values()]
    return {"shape": shapes[0], "parts": rows}


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def text_digest(content: bytes) -> str:
    """SHA-256 of a text file, as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def is_file_name(name: str) -> bool:
    """Whether it names a file in its folder, and nothing outside."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name
