"""The manifest of a checkpoint: what must be in its files. A step is complete only with it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.shards import write_json
from checkpoints.tensor_files import TensorFiles, digest

FILE_NAME = "manifest.json"
FORMAT = 1


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


@dataclass(frozen=True)
class Manifest:
    """Everything about a step but the tensors' values."""

    step: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorRecord]

    def write(self, folder: Path) -> None:
        """Write the manifest, with a digest of itself, into the step's folder."""
        content = {"format": FORMAT, **asdict(self)}
        write_json(folder / FILE_NAME, {"sha256": _digest(content), "content": content})

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest in a step's folder.

        Raises:
            CheckpointError: if it is missing or damaged, or a later version of this wrote it.
        """
        path = folder / FILE_NAME
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
            content = whole["content"]
            intact = whole["sha256"] == _digest(content)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        if not intact:
            raise CheckpointError(f"{path} is not what was saved")
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {content['format']}, but only {FORMAT} is known; "
                "read it with the version that wrote it"
            )
        tensors = {name: TensorRecord(**row) for name, row in content["tensors"].items()}
        return cls(content["step"], content["metadata"], tensors)

    def open(self, folder: Path) -> TensorFiles:
        """The tensors in a step's folder, after a check of everything but their values.

        Raises:
            CheckpointError: if a file or tensor is missing, too many, or of another kind.
        """
        files = dict.fromkeys(record.file for record in self.tensors.values())
        digests = {name: record.sha256 for name, record in self.tensors.items()}
        tensors = TensorFiles([folder / file for file in files], digests)
        different = tensors.keys() ^ self.tensors.keys()
        if different:
            raise CheckpointError(f"{folder} lacks, or should lack, tensor {min(different)}")
        for name, record in self.tensors.items():
            dtype, shape = tensors.spec(name)
            if (dtype.name, list(shape)) != (record.dtype, record.shape):
                raise CheckpointError(
                    f"tensor {name} in {folder} is {dtype.name}{list(shape)}, "
                    f"but was saved as {record.dtype}{record.shape}"
                )
        return tensors


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
