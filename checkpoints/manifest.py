"""Manifest of a saved step: names and SHA-256 of its files; written last."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Self

from checkpoints.errors import CheckpointError, FormatVersionError
from checkpoints.safetensors_files import sha256_of_bytes
from checkpoints.sharded_files import ShardedTensorFiles, ShardedTensorSpec
from checkpoints.step_folders import MANIFEST
from checkpoints.tensor_files import (
    MAX_RECORDS,
    NAMED_DTYPES,
    TensorFiles,
    TensorRecords,
    is_file_name,
    open_recorded_tensors,
    read_records,
    records_from_json,
    records_to_json,
    write_size_checked,
)
from checkpoints.tensor_shards import (
    ShardLayout,
    TensorShard,
    check_shards_cover_tensor,
    iter_with_offsets,
)
from files.errors import FileError
from files.formatting import format_name, format_path, format_value
from files.json_files import JsonObject, read_json_object
from files.text_files import MEBIBYTE, read_bytes

MAX_TEXT = MEBIBYTE
FORMAT = 7
"""Version of the manifest; no other is read."""


@dataclass(frozen=True)
class Manifest:
    """Metadata, file names and SHA-256 hashes of a saved step: its content except tensor values."""

    step: int
    metadata: dict[str, Any]
    tensors: TensorRecords = field(default_factory=dict)
    """Tensor records, if a single process stored all tensors."""

    texts: dict[str, str] = field(default_factory=dict)
    """Text files next to the tensors, such as config.yml: name to SHA-256."""

    record_files: dict[str, str] = field(default_factory=dict)
    """Files of tensor records, one for each process, in their order: name to SHA-256."""

    sharded: dict[str, ShardedTensorSpec] = field(default_factory=dict)
    """Tensors whose shards several processes stored, by name."""

    sha256: str = ""
    """Digest of the manifest, if it was read from a file."""

    def write(self, folder: Path) -> None:
        """Write the manifest and its SHA-256 into the step's folder.

        Raises:
            CheckpointError: the manifest is larger than `MAX_RECORDS`.
        """
        # Tensors with the same sharding share a layout, so that the size of a manifest does not
        # grow with tensors times replicas.
        layouts = {id(one.layout): one.layout for one in self.sharded.values()}
        owners = {id(one.owners): one.owners for one in self.sharded.values()}
        indices = {key: n for each in (layouts, owners) for n, key in enumerate(each)}
        content = {
            "format": FORMAT,
            "step": self.step,
            "metadata": self.metadata,
            "tensors": records_to_json(self.tensors),
            "texts": self.texts,
            "tables": self.record_files,
            "layouts": [_shard_layout_to_json(layout) for layout in layouts.values()],
            "owners": list(owners.values()),
            "cut": {
                name: {
                    "dtype": one.dtype.name,
                    "layout": indices[id(one.layout)],
                    "owners": indices[id(one.owners)],
                }
                for name, one in self.sharded.items()
            },
        }
        manifest = {"sha256": _sha256_of_json(content), "content": content}
        write_size_checked(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest in a step's folder.

        Raises:
            FormatVersionError: another format version wrote it.
            CheckpointError: it is missing or damaged.
        """
        path = folder / MANIFEST
        if not path.exists():
            raise CheckpointError(f"{format_path(path)} is missing")
        try:
            manifest = read_json_object(path, MAX_RECORDS)
            sha256 = manifest.get_text("sha256")
            if sha256 != _sha256_of_json(manifest.get_dict("content")):
                raise CheckpointError(f"{format_path(path)} is not what was saved")
            return cls._from_json(manifest.get_object("content"), path, sha256)
        except CheckpointError:
            raise
        except FileError as error:
            raise CheckpointError(f"{MANIFEST} is damaged: {error}") from error

    @classmethod
    def _from_json(cls, content: JsonObject, path: Path, sha256: str) -> Self:
        saved_format = content.get_count("format")
        if saved_format != FORMAT:
            age = "newer" if saved_format > FORMAT else "older"
            raise FormatVersionError(
                f"{format_path(path)} has format {saved_format}, {age} than the {FORMAT} that this "
                "version reads: use the version that wrote it"
            )
        texts, record_files = content.get_text_dict("texts"), content.get_text_dict("tables")
        if not all(map(is_file_name, (*texts, *record_files))):
            raise FileError(f"{format_path(path)} names files that are not of the checkpoint")
        sharded = _parse_sharded_specs(content, len(record_files))
        step, metadata = content.get_count("step"), content.get_dict("metadata")
        records = records_from_json(content)
        return cls(step, metadata, records, texts, record_files, sharded, sha256)

    def check_text_files(self, folder: Path) -> None:
        """Raise CheckpointError if a text file of the step, such as its config, is not as saved."""
        for name, saved_digest in self.texts.items():
            try:
                digest = sha256_of_bytes(read_bytes(folder / name, MAX_TEXT))
            except FileError as error:
                raise CheckpointError(str(error)) from error
            if digest != saved_digest:
                raise CheckpointError(f"{format_path(folder / name)} is not what was saved")

    def open_tensor_files(self, folder: Path, eager: bool = True) -> TensorFiles:
        """Open the tensor files of a step after checking their headers, but not their values.

        Args:
            eager: False opens and checks the files of sharded tensors on first access.

        Raises:
            CheckpointError: a file or tensor is missing, unexpected, or has another dtype or shape.
        """
        if self.sharded:
            files = ShardedTensorFiles(folder, list(self.record_files.items()), self.sharded)
            if eager:
                files.open_all()
            return files
        records = dict(self.tensors)
        for name, sha256 in self.record_files.items():
            process_records = read_records(folder / name, sha256)
            if duplicates := records.keys() & process_records.keys():
                raise CheckpointError(f"tensor {min(duplicates)} was stored by two processes")
            records |= process_records
        return open_recorded_tensors(folder, records)


def _parse_sharded_specs(content: JsonObject, num_processes: int) -> dict[str, ShardedTensorSpec]:
    """Parse dtype and shards of sharded tensors from JSON; raises FileError if they are invalid."""
    layouts = [_parse_shard_layout(layout) for layout in content.get_object_list("layouts")]
    owners, sharded = content.get_int_lists("owners"), {}
    for name, fields in content.get_objects("cut").items():
        layout = fields.get_count("layout")
        owner = fields.get_count("owners")
        dtype = fields.get_text("dtype")
        if layout >= len(layouts) or owner >= len(owners) or dtype not in NAMED_DTYPES:
            raise FileError(f"tensor {format_name(name)} has no layout, owners or dtype")
        spec = ShardedTensorSpec(NAMED_DTYPES[dtype], layouts[layout], owners[owner])
        if len(spec.owners) != len(spec.layout) or max(spec.owners) >= num_processes:
            raise FileError(f"tensor {format_name(name)} lacks the owner of a shard")
        sharded[name] = spec
    return sharded


def _shard_layout_to_json(layout: ShardLayout) -> dict[str, Any]:
    boxes = []
    for (axes, offsets, sizes), in_box in groupby(layout, lambda shard: shard.box):
        shards = list(in_box)
        assert all(shard.start == start for start, shard in iter_with_offsets(shards))
        lengths = [shard.length for shard in shards]
        boxes.append({"axes": axes, "corner": offsets, "box": sizes, "sizes": lengths})
    return {"shape": list(layout[0].shape), "boxes": boxes}


def _parse_shard_layout(fields: JsonObject) -> ShardLayout:
    """Parse from JSON how a tensor is split into shards.

    Raises:
        FileError: it is invalid, or does not cover the full tensor.
    """
    shape = tuple(fields.get_counts("shape"))
    layout = tuple(
        shard for box in fields.get_object_list("boxes") for shard in _parse_box_shards(box, shape)
    )
    if not layout:
        raise FileError("a tensor has no shards")
    try:
        check_shards_cover_tensor(layout)
    except ValueError as error:
        raise FileError(f"a tensor of shape {shape} cannot be assembled: {error}") from error
    return layout


def _parse_box_shards(fields: JsonObject, shape: tuple[int, ...]) -> list[TensorShard]:
    """Parse the shards in one box (axis-aligned block) of a tensor."""
    axes, offsets, sizes = (tuple(fields.get_counts(name)) for name in ("axes", "corner", "box"))
    if sorted(axes) != list(range(len(shape))) or not len(offsets) == len(sizes) == len(shape):
        raise FileError(f"{format_value(sizes)} is not a box of a tensor of shape {shape}")
    lengths = fields.get_counts("sizes")
    starts = accumulate(lengths, initial=0)
    return [
        TensorShard(shape, axes, offsets, sizes, start, length)
        for start, length in zip(starts, lengths, strict=False)
    ]


def _sha256_of_json(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
