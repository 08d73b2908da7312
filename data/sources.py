"""Sources of data rows: files, folders, and data sets of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import glob, has_magic
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from data.file_readers import (
    GZIP_SUFFIX,
    READERS,
    data_suffix,
    is_data_file,
    read_class_names,
    read_lines,
    read_rows,
    row_without_arrow_nulls,
)
from data.file_readers import DataError as DataError
from data.file_readers import Row as Row
from files.file_location import FileLocation
from files.formatting import format_name, format_path
from files.text_files import check_regular_file
from huggingface import hub

if TYPE_CHECKING:
    from datasets import Dataset

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?", re.ASCII)
PARALLEL = "+"
"""Separator of two parallel text files."""

MIN_BYTES = 8 * 2**20
"""Bytes of a large source: several processes that tokenize it pay off."""

_UNSUPPORTED_SUFFIXES = (".gz", ".xlsx", ".zip")
"""Suffixes of unsupported files; a name with one is no hub data set either."""


class Source(Protocol):
    """Interface of a source of data rows; its `name` is for messages."""

    @property
    def name(self) -> str: ...

    def read_rows(self) -> Iterator[tuple[FileLocation, Row]]:
        """Read the rows of the data source; yields the location and content of each row.

        Raises:
            UserError: there is no such data, or it cannot be read.
        """
        ...

    def read_class_names(self, column: str) -> tuple[str, ...] | None:
        """Class names of a ClassLabel column; None for other columns.

        Raises:
            UserError: as `rows`.
        """
        ...

    def check_local_files(self) -> None:
        """Raise UserError if local files of the data source are missing; reads no content."""
        ...

    def estimate_bytes(self) -> int:
        """Approximate uncompressed bytes of the data source on this machine; 0 if unknown."""
        ...

    def iter_file_hashes(self) -> Iterator[bytes]:
        """Hashes of the content of the source's files; called only if their size is known."""
        ...

    def file_fingerprints(self) -> list[object]:
        """Identifiers that change when the source's local files are written; reads no content."""
        ...


@dataclass(frozen=True)
class FileSource:
    """A single data file."""

    name: str

    def read_class_names(self, column: str) -> tuple[str, ...] | None:
        return read_class_names(Path(self.name), column)

    def check_local_files(self) -> None:
        check_regular_file(Path(self.name))

    def estimate_bytes(self) -> int:
        return _estimate_file_bytes(Path(self.name))

    def iter_file_hashes(self) -> Iterator[bytes]:
        yield _hash_file(Path(self.name))

    def file_fingerprints(self) -> list[object]:
        return [_file_stat(Path(self.name))]

    def read_rows(self) -> Iterator[tuple[FileLocation, Row]]:
        return read_rows(Path(self.name))


@dataclass(frozen=True)
class FileListSource:
    """Several data files, read in order."""

    name: str
    files: Sequence[Source]

    def read_class_names(self, column: str) -> tuple[str, ...] | None:
        """Class names of a column in the first file; raises DataError if another file differs."""
        names_by_file = {file.name: file.read_class_names(column) for file in self.files}
        names = next(iter(names_by_file.values()))
        if (
            differing := next(
                (name for name in names_by_file if names_by_file[name] != names), None
            )
        ) is not None:
            raise DataError(
                f"{format_path(differing)} has other labels in {format_name(column)} than "
                f"{format_path(self.files[0].name)}: give files with the same ones"
            )
        return names

    def check_local_files(self) -> None:
        for file in self.files:
            file.check_local_files()

    def estimate_bytes(self) -> int:
        return sum(file.estimate_bytes() for file in self.files)

    def iter_file_hashes(self) -> Iterator[bytes]:
        for file in self.files:
            yield from file.iter_file_hashes()

    def file_fingerprints(self) -> list[object]:
        return [file.file_fingerprints() for file in self.files]

    def read_rows(self) -> Iterator[tuple[FileLocation, Row]]:
        for file in self.files:
            yield from file.read_rows()


@dataclass(frozen=True)
class ParallelTextSource(FileListSource):
    """Two text files; line n of the second one translates line n of the first one.

    Rows have the columns source and target; an empty line is null.
    """

    files: tuple[FileSource, FileSource]

    def read_class_names(self, column: str) -> tuple[str, ...] | None:
        return None

    def read_rows(self) -> Iterator[tuple[FileLocation, Row]]:
        paths = [Path(file.name) for file in self.files]
        lines = zip_longest(*(read_lines(path) for path in paths))
        for number, texts in enumerate(lines, 1):
            if None in texts:
                shorter = texts.index(None)
                raise DataError(
                    f"{format_path(paths[shorter])} has {number - 1} lines, but "
                    f"{format_path(paths[1 - shorter])} has more: each line needs its translation"
                )
            source, target = (text or None for text in texts)
            yield FileLocation(paths[0], number), {"source": source, "target": target}


@dataclass(frozen=True)
class SavedDataset:
    """A Hugging Face data set in a folder written by `Dataset.save_to_disk`."""

    name: str
    split: str

    @cached_property
    def _loaded_dataset(self) -> Dataset:
        return hub.load_saved_split(self.name, self.split)

    def read_class_names(self, column: str) -> tuple[str, ...] | None:
        return hub.read_class_names(self._loaded_dataset, column)

    def check_local_files(self) -> None:
        """Does nothing: the folder was inspected to recognize it."""

    def estimate_bytes(self) -> int:
        return sum(map(_estimate_file_bytes, self._list_data_files()))

    def iter_file_hashes(self) -> Iterator[bytes]:
        for path in self._list_data_files():
            yield _hash_file(path)

    def file_fingerprints(self) -> list[object]:
        return [_file_stat(path) for path in self._list_data_files()]

    def _list_data_files(self) -> list[Path]:
        return sorted(path for path in Path(self.name).rglob("*") if path.is_file())

    def read_rows(self) -> Iterator[tuple[FileLocation, Row]]:
        rows: Iterable[Row] = self._loaded_dataset
        for index, row in enumerate(rows):
            yield FileLocation(self.name, index, "row"), row_without_arrow_nulls(row)


@dataclass(frozen=True)
class HubDataset:
    """A split of a data set on the Hugging Face hub."""

    path: str
    subset: str | None
    split: str

    @cached_property
    def _loaded_dataset(self) -> Dataset:
        return hub.load_split(self.path, self.subset, self.split)

    def read_class_names(self, column: str) -> tuple[str, ...] | None:
        return hub.read_class_names(self._loaded_dataset, column)

    def check_local_files(self) -> None:
        """Does nothing: the data set is not local."""

    def estimate_bytes(self) -> int:
        return 0

    def iter_file_hashes(self) -> Iterator[bytes]:
        return iter(())

    def file_fingerprints(self) -> list[object]:
        return []

    @property
    def name(self) -> str:
        return f"{self.path}{f':{self.subset}' if self.subset else ''} ({self.split})"

    def read_rows(self) -> Iterator[tuple[FileLocation, Row]]:
        rows: Iterable[Row] = self._loaded_dataset
        for index, row in enumerate(rows):
            yield FileLocation(self.name, index, "row"), row_without_arrow_nulls(row)


def is_large_source(source: Source) -> bool:
    """True if a data source has enough bytes for several processes; False on the hub."""
    return source.estimate_bytes() >= MIN_BYTES


def _estimate_file_bytes(path: Path) -> int:
    """Estimate the uncompressed bytes of a data file."""
    try:
        return path.stat().st_size * (4 if path.suffix.lower() == GZIP_SUFFIX else 1)
    except OSError:  # who reads it says so
        return 0


def _file_stat(path: Path) -> object:
    """Inode, size and change times of a file, by which writes to it are noticed."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {format_path(path)}: {error.strerror or error}") from error
    return str(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _hash_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return path.name.encode() + hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise DataError(f"cannot read {format_path(path)}: {error.strerror or error}") from error


def source_from_name(source_name: str, split: str) -> Source:
    """Data source that a flag names: files, a folder, or the hub's `NAME[:SUBSET][@SPLIT]`.

    Files are separated by commas; a part may be a pattern such as `data/*.jsonl`, or, if all are,
    two parallel text files such as `train.en+train.de`.

    Args:
        split: of the hub's data set, where none is given.

    Raises:
        DataError: no file fits a pattern, a folder has none, or the name can be neither.
    """
    if Path(source_name).is_dir():
        return _folder_source(source_name, split)
    if PARALLEL in source_name and not Path(source_name).exists():
        return _parallel_source(source_name)
    if _looks_like_file(source_name):
        return FileSource(source_name)
    name, _, split_in_name = source_name.partition("@")
    path, _, subset = name.partition(":")
    is_of_hub = _HUB_NAME.fullmatch(path) is not None
    if "," in source_name or (has_magic(source_name) and not is_of_hub):
        patterns = [pattern.strip() for pattern in source_name.split(",")]
        files = [FileSource(name) for pattern in patterns for name in _expand_glob(pattern)]
        return files[0] if len(files) == 1 else FileListSource(source_name, files)
    if not is_of_hub:
        raise DataError(
            f"{format_path(source_name)} is no file here, and cannot be a data set of the hub: "
            f"give one of {', '.join(READERS)}, or NAME[:SUBSET][@SPLIT]"
        )
    return HubDataset(path, subset or None, split_in_name or split)


def _parallel_source(value: str) -> Source:
    """Data source of parallel text files in pairs, such as `train.en+train.de`, with commas."""
    sources = list[Source]()
    for pair in value.split(","):
        names = [name.strip() for name in pair.split(PARALLEL)]
        if len(names) != 2 or not all(names):
            raise DataError(
                f"{format_path(pair)} must be two files of text, such as train.en+train.de: one "
                "that the model reads, and one with a translation in each line"
            )
        sources.append(
            ParallelTextSource(pair.strip(), (FileSource(names[0]), FileSource(names[1])))
        )
    return sources[0] if len(sources) == 1 else FileListSource(value, sources)


def _folder_source(name: str, split: str) -> Source:
    """Data source of a folder: a saved data set, or the folder's data files of one type.

    Files in subfolders are included.
    """
    if any((Path(name) / mark).is_file() for mark in hub.DATASET_FILES):
        return SavedDataset(name, split)
    candidates = (path for path in Path(name).rglob("*") if path.is_file() and is_data_file(path))
    paths = sorted(p for p in candidates if not any(n[0] == "." for n in p.relative_to(name).parts))
    suffixes = sorted({data_suffix(path) for path in paths})
    if not suffixes:
        raise DataError(
            f"folder {format_path(name)} holds no data: it must have files of one of the kinds "
            f"{', '.join(READERS)}, or be one that save_to_disk of datasets wrote"
        )
    if len(suffixes) > 1:
        raise DataError(
            f"folder {format_path(name)} has files of the kinds {', '.join(suffixes)}: name those "
            f"that are meant, such as '{format_path(name)}/**/*{suffixes[0]}'"
        )
    return FileListSource(name, [FileSource(str(path)) for path in paths])


def _looks_like_file(name: str) -> bool:
    """True if the name of a data source looks like a file's, which need not exist."""
    if Path(name).exists():
        return True
    one = "," not in name and not has_magic(name)
    return one and (is_data_file(Path(name)) or Path(name).suffix.lower() in _UNSUPPORTED_SUFFIXES)


def _expand_glob(pattern: str) -> list[str]:
    """Files that match a file name or glob pattern, sorted."""
    if _looks_like_file(pattern) or not has_magic(pattern):
        return [pattern]
    matching = sorted(name for name in glob(pattern, recursive=True) if Path(name).is_file())
    if not matching:
        raise DataError(f"no file fits the pattern {format_path(pattern)}: check the path")
    return matching
