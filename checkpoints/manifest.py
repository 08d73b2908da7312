"""The manifest of a checkpoint: what must be in its files. A step is complete only with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from checkpoints.digests import digest_of_bytes
from checkpoints.errors import CheckpointError, NewerFormatError
from checkpoints.layouts import Piece, layout_data, pieces_of, read_layout
from checkpoints.parts import Layout, Part, check_whole
from checkpoints.tabled import ShardedTensor, ShardedTensorFiles, check_recorded
from checkpoints.tables import (
    MAX_TABLE,
    NAMED_DTYPES,
    Records,
    Table,
    TensorRecord,
    is_file_name,
    stored_name,
    write_checked,
)
from checkpoints.tensor_files import TensorFiles
from files.errors import FileError
from files.json_files import Fields, read_object
from files.shown import shown, shown_name, shown_path
from files.text import MEBIBYTE, read_bytes

FILE_NAME = "manifest.json"
MAX_TEXT = MEBIBYTE
FORMAT = 6
"""1 had no texts, 2 no tensors in parts, 3 a record of each part, 4 one digest of each tensor; in 5
only tables said which process had stored which part."""

Pieces = dict[str, list[Piece]]
"""Tensors that are stored in parts, by name."""


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

    layouts: Sequence[Layout] = ()
    numbers: dict[str, int] = field(default_factory=dict)
    """The same in formats 4 and 5: name to the number of their layout."""

    parts: dict[str, dict[str, Part]] = field(default_factory=dict)
    """The same in format 3: the parts by their names in the files."""

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
            NewerFormatError: a later version of this wrote it.
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
        if written > FORMAT:
            raise NewerFormatError(
                f"{shown_path(path)} has format {written}, newer than the {FORMAT} that this "
                "version reads: use the version that wrote it"
            )
        tensors = {n: TensorRecord.read(row) for n, row in content.objects("tensors").items()}
        texts = content.texts("texts") if written > 1 else {}
        tables = content.texts("tables") if written > 3 else {}
        if not all(map(is_file_name, (*texts, *tables))):
            raise FileError(f"{shown_path(path)} names files that are not of the checkpoint")
        in_parts = content.objects("parts") if written == 3 else {}
        layouts = [read_layout(row) for row in content.rows("layouts")] if written > 3 else []
        numbers = content.all_counts("cut") if written in (4, 5) else {}
        if any(number >= len(layouts) for number in numbers.values()):
            raise FileError(f"{shown_path(path)} has tensors without a layout")
        return cls(
            content.count("step"), content.mapping("metadata"), tensors, texts, tables,
            _read_sharded(content, layouts, len(tables)) if written > 5 else {},
            layouts, numbers, {name: _read_parts(row) for name, row in in_parts.items()}, sha256,
        )  # fmt: skip

    def check_texts(self, folder: Path) -> None:
        """Raise CheckpointError unless every text file is as it was saved."""
        for name, saved in self.texts.items():
            try:
                found = digest_of_bytes(read_bytes(folder / name, MAX_TEXT))
            except FileError as error:
                raise CheckpointError(str(error)) from error
            if found != saved:
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
            found = ShardedTensorFiles(folder, list(self.tables.items()), self.cut)
            if at_once:
                found.open_all()
            return found
        tables = [Table.read(folder / name, sha256) for name, sha256 in self.tables.items()]
        records = _merged(self.tensors, tables)
        pieces = self._pieces(tables)
        files = dict.fromkeys(record.file for record in records.values())
        digests = {name: record.digests(name) for name, record in records.items()}
        tensors = TensorFiles([folder / file for file in files], digests, pieces)
        check_recorded(folder, tensors, records)
        return tensors

    def _pieces(self, tables: Sequence[Table]) -> Pieces:
        found = {name: _old_pieces(name, parts) for name, parts in self.parts.items()}
        for name, number in self.numbers.items():
            layout, numbers = self.layouts[number], list[int]()
            pieces: list[Piece] = []
            for process, table in enumerate(tables):
                held = [i for i in table.held.get(name, ()) if i < len(layout)]
                numbers += held
                pieces += pieces_of(stored_name(name, process), [layout[i] for i in held])
            if sorted(numbers) != list(range(len(layout))):
                raise _no_whole(name, "not all of its parts are there, each once")
            found[name] = pieces
        return found


def _merged(own: Records, tables: Sequence[Table]) -> Records:
    """The records of all processes."""
    found = dict(own)
    for table in tables:
        twice = found.keys() & table.tensors.keys()
        if twice:
            raise CheckpointError(f"tensor {min(twice)} was stored by two processes")
        found |= table.tensors
    return found


Listed = TypeVar("Listed")


def _each_once(values: Iterable[Listed]) -> tuple[list[Listed], list[int]]:
    """Each object once, and which of them each value is."""
    places: dict[int, int] = {}
    found: list[Listed] = []
    numbers = []
    for value in values:
        if id(value) not in places:
            places[id(value)] = len(found)
            found.append(value)
        numbers.append(places[id(value)])
    return found, numbers


def _read_sharded(
    content: Fields, layouts: Sequence[Layout], processes: int
) -> dict[str, ShardedTensor]:
    """The tensors in parts. Raises FileError if they are none."""
    owners, found = content.lists("owners"), {}
    for name, row in content.objects("cut").items():
        layout, owner, dtype = row.count("layout"), row.count("owners"), row.text("dtype")
        if layout >= len(layouts) or owner >= len(owners) or dtype not in NAMED_DTYPES:
            raise FileError(f"tensor {shown_name(name)} has no layout, no owners or no type")
        found[name] = ShardedTensor(NAMED_DTYPES[dtype], layouts[layout], owners[owner])
    for each in {id(one): one for one in found.values()}.values():
        if len(each.owners) != len(each.layout) or max(each.owners) >= processes:
            raise FileError("not all parts of a tensor are there, each once")
    return found


# ---- format 3 -----------------------------------------------------------------------------------
def _read_parts(fields: Fields) -> dict[str, Part]:
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


def _old_pieces(name: str, parts: Mapping[str, Part]) -> list[Piece]:
    try:
        check_whole(parts.values())
    except ValueError as error:
        raise _no_whole(name, str(error)) from error
    return [Piece(stored, 0, part) for stored, part in parts.items()]


def _no_whole(name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"tensor {shown_name(name)} cannot be put together: {reason}")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
