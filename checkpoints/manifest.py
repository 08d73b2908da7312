"""The manifest of a checkpoint: what must be in its files. A step is complete only with it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Self

from checkpoints.errors import CheckpointError, OtherFormatError
from checkpoints.safetensors_files import digest_of_bytes
from checkpoints.sharded_files import ShardedTensor, ShardedTensorFiles
from checkpoints.tensor_files import (
    MAX_RECORDS,
    NAMED_DTYPES,
    Records,
    TensorFiles,
    is_file_name,
    open_records,
    read_records,
    records_data,
    records_in,
    write_checked,
)
from checkpoints.tensor_shards import Layout, Part, check_whole, with_starts
from files.errors import FileError
from files.formatting import format_name, format_path, format_value
from files.json_files import JsonObject, read_object
from files.text_files import MEBIBYTE, read_bytes

FILE_NAME = "manifest.json"
MAX_TEXT = MEBIBYTE
FORMAT = 7
"""Only this one is read: no release wrote another."""


@dataclass(frozen=True)
class Manifest:
    """Everything about a step but the tensors' values."""

    step: int
    metadata: dict[str, Any]
    tensors: Records = field(default_factory=dict)
    """Of the tensors, if one process has stored all."""

    texts: dict[str, str] = field(default_factory=dict)
    """Text files next to the tensors, such as config.yml: name to SHA-256 of the content."""

    tables: dict[str, str] = field(default_factory=dict)
    """Files of the records of several processes, in their order: name to SHA-256."""

    cut: dict[str, ShardedTensor] = field(default_factory=dict)
    """Tensors that several processes have stored in parts."""

    sha256: str = ""
    """The digest of a manifest that was read."""

    def write(self, folder: Path) -> None:
        """Write the manifest, with a digest of itself, into the step's folder.

        Raises:
            CheckpointError: it is larger than what may be read.
        """
        # Tensors that are cut alike share a layout: a manifest grows with the tensors, and not with
        # the tensors times the replicas.
        layouts = {id(one.layout): one.layout for one in self.cut.values()}
        owners = {id(one.owners): one.owners for one in self.cut.values()}
        numbers = {key: n for each in (layouts, owners) for n, key in enumerate(each)}
        content = {
            "format": FORMAT,
            "step": self.step,
            "metadata": self.metadata,
            "tensors": records_data(self.tensors),
            "texts": self.texts,
            "tables": self.tables,
            "layouts": [_layout_data(layout) for layout in layouts.values()],
            "owners": list(owners.values()),
            "cut": {
                name: {
                    "dtype": one.dtype.name,
                    "layout": numbers[id(one.layout)],
                    "owners": numbers[id(one.owners)],
                }
                for name, one in self.cut.items()
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
            raise CheckpointError(f"{format_path(path)} is missing")
        try:
            whole = read_object(path, MAX_RECORDS)
            sha256 = whole.text("sha256")
            if sha256 != _digest(whole.mapping("content")):
                raise CheckpointError(f"{format_path(path)} is not what was saved")
            return cls._of(whole.object("content"), path, sha256)
        except CheckpointError:
            raise
        except FileError as error:
            raise CheckpointError(f"{FILE_NAME} is damaged: {error}") from error

    @classmethod
    def _of(cls, content: JsonObject, path: Path, sha256: str) -> Self:
        written = content.count("format")
        if written != FORMAT:
            age = "newer" if written > FORMAT else "older"
            raise OtherFormatError(
                f"{format_path(path)} has format {written}, {age} than the {FORMAT} that this "
                "version reads: use the version that wrote it"
            )
        texts, tables = content.text_mapping("texts"), content.text_mapping("tables")
        if not all(map(is_file_name, (*texts, *tables))):
            raise FileError(f"{format_path(path)} names files that are not of the checkpoint")
        return cls(
            content.count("step"), content.mapping("metadata"), records_in(content), texts, tables,
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
                raise CheckpointError(f"{format_path(folder / name)} is not what was saved")

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
        records = dict(self.tensors)
        for name, sha256 in self.tables.items():
            own = read_records(folder / name, sha256)
            if twice := records.keys() & own.keys():
                raise CheckpointError(f"tensor {min(twice)} was stored by two processes")
            records |= own
        return open_records(folder, records)


def _read_sharded(content: JsonObject, processes: int) -> dict[str, ShardedTensor]:
    """The tensors in parts. Raises FileError if they are none."""
    layouts = [_read_layout(row) for row in content.object_list("layouts")]
    owners, parsed = content.int_lists("owners"), {}
    for name, row in content.objects("cut").items():
        layout, owner, dtype = row.count("layout"), row.count("owners"), row.text("dtype")
        if layout >= len(layouts) or owner >= len(owners) or dtype not in NAMED_DTYPES:
            raise FileError(f"tensor {format_name(name)} has no layout, no owners or no type")
        one = ShardedTensor(NAMED_DTYPES[dtype], layouts[layout], owners[owner])
        if len(one.owners) != len(one.layout) or max(one.owners) >= processes:
            raise FileError("not all parts of a tensor are there, each once")
        parsed[name] = one
    return parsed


def _layout_data(layout: Layout) -> dict[str, Any]:
    """A layout as data for JSON."""
    boxes = []
    for (axes, corner, box), inside in groupby(layout, lambda part: part.place):
        parts = list(inside)
        assert all(part.start == start for start, part in with_starts(parts))
        boxes.append({"axes": axes, "corner": corner, "box": box, "sizes": [p.size for p in parts]})
    return {"shape": list(layout[0].shape), "boxes": boxes}


def _read_layout(fields: JsonObject) -> Layout:
    """The layout in a manifest.

    Raises:
        FileError: it is none, or not of whole tensors.
    """
    shape = tuple(fields.counts("shape"))
    layout = tuple(part for box in fields.object_list("boxes") for part in _read_box(box, shape))
    if not layout:
        raise FileError("a tensor has no parts")
    try:
        check_whole(layout)
    except ValueError as error:
        raise FileError(f"a tensor of shape {shape} cannot be put together: {error}") from error
    return layout


def _read_box(fields: JsonObject, shape: tuple[int, ...]) -> list[Part]:
    axes, corner, box = (tuple(fields.counts(what)) for what in ("axes", "corner", "box"))
    if sorted(axes) != list(range(len(shape))) or not len(corner) == len(box) == len(shape):
        raise FileError(f"{format_value(box)} is no box of a tensor of shape {shape}")
    sizes = fields.counts("sizes")
    starts = accumulate(sizes, initial=0)
    return [
        Part(shape, axes, corner, box, start, size)
        for start, size in zip(starts, sizes, strict=False)
    ]


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
