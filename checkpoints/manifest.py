"""The manifest of a checkpoint: what must be in its files. A step is complete only with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from checkpoints.digests import digest_of_bytes
from checkpoints.errors import CheckpointError, OtherFormatError
from checkpoints.layouts import layout_data, read_layout
from checkpoints.tabled import ShardedTensor, ShardedTensorFiles, tensors_of
from checkpoints.tables import (
    MAX_TABLE,
    NAMED_DTYPES,
    Records,
    Table,
    TensorRecord,
    is_file_name,
    write_checked,
)
from checkpoints.tensor_files import TensorFiles
from files.errors import FileError
from files.json_files import Fields, read_object
from files.shown import shown_name, shown_path
from files.text import MEBIBYTE, read_bytes

FILE_NAME = "manifest.json"
MAX_TEXT = MEBIBYTE
FORMAT = 6
"""Only this one is read: no release wrote another."""


@dataclass(frozen=True)
class Manifest:
    """Everything about a step but the tensors' values."""

    step: int
    metadata: dict[str, Any]
    tensors: Records = field(default_factory=dict)
    """Records of the tensors, if one process has stored all."""

    texts: dict[str, str] = field(default_factory=dict)
    """Text files next to the tensors, such as config.yml: name to SHA-256 of the content."""

    tables: dict[str, str] = field(default_factory=dict)
    """What each of several processes has stored: name of the file to its SHA-256, in the order of
    the processes. See `checkpoints.tables`."""

    cut: dict[str, ShardedTensor] = field(default_factory=dict)
    """Tensors that several processes have stored in parts."""

    sha256: str = ""
    """The digest of a manifest that was read."""

    def write(self, folder: Path) -> None:
        """Write the manifest, with a digest of itself, into the step's folder.

        Raises:
            CheckpointError: it is larger than what may be read.
        """
        layouts, layout_of = _each_once(one.layout for one in self.cut.values())
        owners, owners_of = _each_once(one.owners for one in self.cut.values())
        content = {
            "format": FORMAT,
            "step": self.step,
            "metadata": self.metadata,
            "tensors": {name: asdict(record) for name, record in self.tensors.items()},
            "texts": self.texts,
            "tables": self.tables,
            "layouts": [layout_data(layout) for layout in layouts],
            "owners": owners,
            "cut": {
                name: {"dtype": one.dtype.name, "layout": layout, "owners": owner}
                for (name, one), layout, owner in zip(
                    self.cut.items(), layout_of, owners_of, strict=True
                )
            },
        }
        whole = {"sha256": _digest(content), "content": content}
        write_checked(folder / FILE_NAME, json.dumps(whole, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest in a step's folder.

        Raises:
            OtherFormatError: another version of this wrote it.
            CheckpointError: it is missing or damaged.
        """
        path = folder / FILE_NAME
        if not path.exists():
            raise CheckpointError(f"{shown_path(path)} is missing")
        try:
            whole = read_object(path, MAX_TABLE)
            sha256 = whole.text("sha256")
            if sha256 != _digest(whole.mapping("content")):
                raise CheckpointError(f"{shown_path(path)} is not what was saved")
            return cls._of(whole.object("content"), path, sha256)
        except CheckpointError:
            raise
        except FileError as error:
            raise CheckpointError(f"{FILE_NAME} is damaged: {error}") from error

    @classmethod
    def _of(cls, content: Fields, path: Path, sha256: str) -> Self:
        written = content.count("format")
        if written != FORMAT:
            age = "newer" if written > FORMAT else "older"
            raise OtherFormatError(
                f"{shown_path(path)} has format {written}, {age} than the {FORMAT} that this "
                "version reads: use the version that wrote it"
            )
        tensors = {n: TensorRecord.read(row) for n, row in content.objects("tensors").items()}
        texts, tables = content.texts("texts"), content.texts("tables")
        if not all(map(is_file_name, (*texts, *tables))):
            raise FileError(f"{shown_path(path)} names files that are not of the checkpoint")
        return cls(
            content.count("step"), content.mapping("metadata"), tensors, texts, tables,
            _read_sharded(content, len(tables)), sha256,
        )  # fmt: skip

    def check_texts(self, folder: Path) -> None:
        """Raise CheckpointError unless every text file is as it was saved."""
        for name, saved in self.texts.items():
            try:
                digest = digest_of_bytes(read_bytes(folder / name, MAX_TEXT))
            except FileError as error:
                raise CheckpointError(str(error)) from error
            if digest != saved:
                raise CheckpointError(f"{shown_path(folder / name)} is not what was saved")

    def open(self, folder: Path, at_once: bool = True) -> TensorFiles:
        """The tensors in a step's folder, after a check of everything but their values.

        Args:
            at_once: False leaves what several processes have stored to who asks for it, and with
                it the check.

        Raises:
            CheckpointError: if a file or tensor is missing, too many, or of another kind.
        """
        if self.cut:
            files = ShardedTensorFiles(folder, list(self.tables.items()), self.cut)
            if at_once:
                files.open_all()
            return files
        tables = [Table.read(folder / name, sha256) for name, sha256 in self.tables.items()]
        records = _merged(self.tensors, tables)
        return tensors_of(folder, records)


def _merged(own: Records, tables: Sequence[Table]) -> Records:
    """The records of all processes."""
    merged = dict(own)
    for table in tables:
        twice = merged.keys() & table.tensors.keys()
        if twice:
            raise CheckpointError(f"tensor {min(twice)} was stored by two processes")
        merged |= table.tensors
    return merged


Listed = TypeVar("Listed")


def _each_once(values: Iterable[Listed]) -> tuple[list[Listed], list[int]]:
    """Each object once, and which of them each value is."""
    places: dict[int, int] = {}
    listed: list[Listed] = []
    numbers = []
    for value in values:
        if id(value) not in places:
            places[id(value)] = len(listed)
            listed.append(value)
        numbers.append(places[id(value)])
    return listed, numbers


def _read_sharded(content: Fields, processes: int) -> dict[str, ShardedTensor]:
    """The tensors in parts. Raises FileError if they are none."""
    layouts = [read_layout(row) for row in content.rows("layouts")]
    owners, parsed = content.lists("owners"), {}
    for name, row in content.objects("cut").items():
        layout, owner, dtype = row.count("layout"), row.count("owners"), row.text("dtype")
        if layout >= len(layouts) or owner >= len(owners) or dtype not in NAMED_DTYPES:
            raise FileError(f"tensor {shown_name(name)} has no layout, no owners or no type")
        parsed[name] = ShardedTensor(NAMED_DTYPES[dtype], layouts[layout], owners[owner])
    for each in {id(one): one for one in parsed.values()}.values():
        if len(each.owners) != len(each.layout) or max(each.owners) >= processes:
            raise FileError("not all parts of a tensor are there, each once")
    return parsed


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
