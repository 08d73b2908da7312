"""Where rows come from: files, and data sets of the Hugging Face hub."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from config.errors import UserError
from files.json_files import json_lines, parse_json
from files.shown import shown, shown_name, shown_path
from files.text import check_regular, decoded
from huggingface import hub

Row = Mapping[str, Any]
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


class DataError(UserError, ValueError):
    """Data that cannot be read, or does not fit the task."""


class Source(Protocol):
    """Rows, and what to call them in messages."""

    @property
    def name(self) -> str: ...

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Each row after its place, such as `train.jsonl, line 3`.

        Raises:
            UserError: there is no such data, or it cannot be read.
        """
        ...


@dataclass(frozen=True)
class File:
    """A file of rows: JSON Lines, CSV or TSV with a header, or Parquet."""

    name: str

    def rows(self) -> Iterator[tuple[str, Row]]:
        path, name = Path(self.name), shown_path(self.name)
        reader = _READERS.get(path.suffix.lower())
        if reader is None:
            raise DataError(
                f"{name} is not a kind of file that is known: give one of {', '.join(_READERS)}"
            )
        try:
            check_regular(path)
            for number, row in reader(path):
                yield f"{name}, {number}", row
        except OSError as error:
            raise DataError(f"cannot read {name}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{name} is not UTF-8 text: save it in that encoding") from error


@dataclass(frozen=True)
class HubDataset:
    """A split of a data set of the hub."""

    path: str
    subset: str | None
    split: str

    @property
    def name(self) -> str:
        return f"{self.path}{f':{self.subset}' if self.subset else ''} ({self.split})"

    def rows(self) -> Iterator[tuple[str, Row]]:
        found: Iterable[Row] = hub.load_split(self.path, self.subset, self.split)
        for index, row in enumerate(found):
            yield f"{self.name}, row {index}", row


def source_of(given: str, split: str) -> Source:
    """The source that a flag names: a file by its suffix, else `NAME[:SUBSET][@SPLIT]` of the hub.

    Args:
        split: of the hub's data set, where none is given.
    """
    if Path(given).suffix.lower() in (*_READERS, *_OTHER_FILES) or Path(given).exists():
        return File(given)
    whole, _, named = given.partition("@")
    path, _, subset = whole.partition(":")
    if not _HUB_NAME.fullmatch(path):
        raise DataError(
            f"{shown_path(given)} is no file here, and cannot be a data set of the hub: give one "
            f"of {', '.join(_READERS)}, or NAME[:SUBSET][@SPLIT]"
        )
    return HubDataset(path, subset or None, named or split)


_OTHER_FILES = (".gz", ".txt", ".xlsx", ".zip")
"""Suffixes of files that are not read: such a name is no data set of the hub."""


# ---- files --------------------------------------------------------------------------------------
def _json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open("rb") as lines:
        for number, row in json_lines(path, lines):
            if not isinstance(row, dict):
                raise DataError(
                    f"{shown_path(path)}, line {number} is {shown(row)}, but must be an object"
                )
            yield f"line {number}", row


def _json_array(path: Path) -> Iterator[tuple[str, Row]]:
    rows = parse_json(decoded(path.read_bytes(), path), path)
    if not isinstance(rows, list):
        raise DataError(f"{shown_path(path)} is {shown(rows)}, but must be an array of objects")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(
                f"{shown_path(path)}, row {number} is {shown(row)}, but must be an object"
            )
        yield f"row {number}", row


def _separated(separator: str) -> Callable[[Path], Iterator[tuple[str, Row]]]:
    def read(path: Path) -> Iterator[tuple[str, Row]]:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=separator, strict=True)
            try:
                _check_header(path, reader.fieldnames or ())
                for row in reader:
                    if None in row or None in row.values():
                        count = len(reader.fieldnames or ())
                        raise DataError(
                            f"{shown_path(path)}, line {reader.line_num}: the header has {count} "
                            "columns, but this row has another number"
                        )
                    yield f"line {reader.line_num}", row
            except csv.Error as error:
                raise DataError(f"{shown_path(path)}, line {reader.line_num}: {error}") from None

    return read


def _check_header(path: Path, columns: Sequence[str]) -> None:
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{shown_path(path)}, line 1: the column {shown(twice)} stands twice")


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{shown_path(path)} is not a Parquet file: {shown_name(str(error))}"
        ) from None


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Row]]]] = {
    ".jsonl": _json_lines,
    ".json": _json_array,
    ".csv": _separated(","),
    ".tsv": _separated("\t"),
    ".parquet": _parquet,
}
