"""File format of tokenized examples: columns of texts, tokens and locations, read lazily."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints.safetensors_files import write_safetensors
from data.examples import Corpus, Example, Languages, TokenizedText
from files.atomic_writing import write_file_atomically
from files.errors import FileError
from files.file_location import FileLocation
from files.formatting import format_path
from files.json_files import JsonObject, parse_json

T = TypeVar("T")


class LazySequence(Sequence[T]):
    """A sequence whose items are created on access."""

    def __init__(self, make: Callable[[int], T], indices: range) -> None:
        self._make, self._indices = make, indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return LazySequence(self._make, self._indices[index])
        return self._make(self._indices[index])


@dataclass
class TokenStore:
    """Collects tokenized examples and writes them to a file as columns.

    Attributes:
        texts: UTF-8 of prompts and targets, alternating.
        sizes: bytes of each text.
        ids: token ids of each example.
        loss_mask: loss mask of each example.
        lengths: tokens of each example.
        locations: file number and row number of each example.
        files: number of each file.
        language_numbers: number of each example's languages.
        languages: number of each pair of languages.
    """

    texts: list[bytes] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    loss_mask: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    locations: list[tuple[int, int]] = field(default_factory=list)
    files: dict[tuple[str, str], int] = field(default_factory=dict)
    language_numbers: list[int] = field(default_factory=list)
    languages: dict[Languages, int] = field(default_factory=dict)

    def add_example(self, location: FileLocation, example: Example, tokens: TokenizedText) -> None:
        """Add a tokenized example; of a document chunk only tokens are stored."""
        stored_target = "" if example.doc_chunk else example.target
        for text in (example.prompt, stored_target):
            self.texts.append(text.encode(errors="surrogatepass"))
            self.sizes.append(len(self.texts[-1]))
        self.ids.append(tokens.ids)
        self.loss_mask.append(tokens.loss_mask)
        self.lengths.append(len(tokens.ids))
        source = str(location.path), location.unit
        self.locations.append((self.files.setdefault(source, len(self.files)), location.number))
        number = self.languages.setdefault(example.languages, len(self.languages))
        self.language_numbers.append(number)

    def write_columns(self, path: Path, metadata_fields: dict[str, Any]) -> None:
        """Write the columns of tokenized examples and JSON metadata to a file.

        Raises:
            WriteError: it cannot be written.
        """
        arrays = {
            "texts": np.frombuffer(b"".join(self.texts), np.uint8),
            "text_starts": _lengths_to_offsets(self.sizes),
            "ids": _concatenate_arrays(self.ids, np.int32),
            "loss_mask": _concatenate_arrays(self.loss_mask, bool),
            "starts": _lengths_to_offsets(self.lengths),
            "places": np.asarray(self.locations, np.int64).reshape(-1, 2),
            "languages": np.asarray(self.language_numbers, np.int32),
        }
        names = {"files": list(self.files), "languages": list(self.languages)}
        metadata_json = json.dumps({**metadata_fields, **names})
        metadata = {"facts": metadata_json, "sha256": _hash_columns(arrays, metadata_json)}
        write_file_atomically(
            "prepared data", path, lambda draft: write_safetensors(draft, arrays, metadata)
        )


def read_token_store(path: Path) -> tuple[Corpus, JsonObject]:
    """Open a file of tokenized examples; returns them as a corpus, with the file's metadata.

    Raises:
        FileError: there is no such file, or it is damaged.
    """
    try:
        with safe_open(path, "np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise FileError(f"{format_path(path)} cannot be read: {error}") from error
    if metadata.get("sha256") != _hash_columns(arrays, metadata.get("facts", "")):
        raise FileError(f"{format_path(path)} is damaged")
    metadata_fields = JsonObject(parse_json(metadata["facts"], path), format_path(path))
    texts, location_array = arrays["texts"].tobytes(), arrays["places"]
    text_starts, starts = arrays["text_starts"].tolist(), arrays["starts"].tolist()
    ids, loss_mask, files = arrays["ids"], arrays["loss_mask"], metadata_fields.data["files"]
    languages = [Languages(*pair) for pair in metadata_fields.data["languages"]]

    def get_text(index: int) -> str:
        encoded = texts[text_starts[index] : text_starts[index + 1]]
        return encoded.decode(errors="surrogatepass")

    def get_tokens(index: int) -> TokenizedText:
        token_range = slice(starts[index], starts[index + 1])
        return TokenizedText(ids[token_range], loss_mask[token_range])

    def get_location(index: int) -> FileLocation:
        number, line = location_array[index].tolist()
        name, unit = files[number]
        return FileLocation(name, line, unit)

    def get_example(index: int) -> Example:
        pair = languages[arrays["languages"][index]]
        return Example(get_text(2 * index), get_text(2 * index + 1), languages=pair)

    indices = range(len(starts) - 1)
    corpus = Corpus(
        LazySequence(get_example, indices),
        metadata_fields.get_count("unlabeled"),
        metadata_fields.get_count("nulls"),
        LazySequence(get_location, indices),
        LazySequence(get_tokens, indices),
        metadata_fields.get_text("characters"),
        metadata["sha256"],
    )
    return corpus, metadata_fields


def _lengths_to_offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype=np.int64)


def _concatenate_arrays(arrays: Iterable[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays])


def _hash_columns(arrays: dict[str, np.ndarray], metadata_json: str) -> str:
    sha256 = hashlib.sha256(metadata_json.encode())
    for name in sorted(arrays):
        sha256.update(f"{name}{arrays[name].dtype.str}{arrays[name].shape}".encode())
        sha256.update(np.ascontiguousarray(arrays[name]).data)
    return sha256.hexdigest()
