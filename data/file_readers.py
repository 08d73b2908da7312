"""Readers of data files: JSON Lines, JSON, CSV, TSV, text (also gzipped) and Parquet."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from config.errors import UserError
from files.errors import FileError
from files.file_location import FileLocation
from files.formatting import format_name, format_path, format_value
from files.json_files import MAX_LINE_BYTES, parse_json, parse_json_lines
from files.text_files import check_not_lfs_pointer, check_regular_file, decode_text

Row = Mapping[str, Any]
GZIP_SUFFIX = ".gz"
MAX_JSON_BYTES = 2**30
"""Maximum uncompressed bytes of a .json file, which is read at once."""

SEPARATORS = ",;\t|"
"""Possible separators of a .csv; the most frequent one in the header is used."""

_QUOTED = re.compile(r'"[^"]*"')


def drop_arrow_nulls(value: Any) -> Any:
    """Remove nulls that Arrow adds where rows hold objects with different fields.

    In a table all objects of a column have the same fields: those that a row's object lacks are
    null. Nulls of columns and items of lists stay.
    """
    if isinstance(value, Mapping):
        return {
            name: drop_arrow_nulls(field_value)
            for name, field_value in value.items()
            if field_value is not None
        }
    if isinstance(value, list):
        return [drop_arrow_nulls(field_value) for field_value in value]
    return value


def row_without_arrow_nulls(arrow_row: Row) -> Row:
    """Convert an Arrow table's row to plain data without added nulls."""
    return {column: drop_arrow_nulls(value) for column, value in arrow_row.items()}


class DataError(UserError, ValueError):
    """Raised for data that cannot be read or do not fit the task."""


def data_suffix(path: Path) -> str:
    """Suffix of a data file name without .gz, such as `.jsonl` of `rows.jsonl.gz`."""
    name = path.name.lower()
    return Path(name.removesuffix(GZIP_SUFFIX)).suffix


def is_data_file(path: Path) -> bool:
    """True if a file name has the suffix of a supported data format."""
    suffix, is_gzipped = data_suffix(path), path.suffix.lower() == GZIP_SUFFIX
    return suffix in READERS and not (is_gzipped and suffix == ".parquet")


def read_rows(path: Path) -> Iterator[tuple[FileLocation, Row]]:
    """Read a data file; yields the location and content of each row.

    Raises:
        UserError: it is no file of rows, cannot be read, or is damaged.
    """
    name = format_path(path)
    if not is_data_file(path):
        raise DataError(
            f"{name} is not a kind of file that is known: give one of {', '.join(READERS)}, "
            "all but .parquet also as .gz"
        )
    with _open_data(path) as file:
        yield from READERS[data_suffix(path)](path, file)


def read_lines(path: Path) -> Iterator[str]:
    """Read the lines of a text file, plain or gzipped, without their line ends.

    Raises:
        UserError: as `read_rows`.
    """
    with _open_data(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="\n") as text:
        for line in _read_lines(path, text):
            yield line.rstrip("\r\n")


@contextmanager
def _open_data(path: Path) -> Iterator[BinaryIO]:
    """Context with a data file, which is unpacked if it is .gz; errors become UserErrors."""
    name = format_path(path)
    try:
        check_regular_file(path)
        check_not_lfs_pointer(path)
        with path.open("rb") as file:
            if path.suffix.lower() != GZIP_SUFFIX:
                yield file
                return
            with gzip.open(file) as unpacked:
                yield cast(BinaryIO, unpacked)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{name} is damaged, or no file of gzip: {error}") from error
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 text: save it in that encoding") from error


def _read_jsonl_rows(path: Path, file: BinaryIO) -> Iterator[tuple[FileLocation, Row]]:
    lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
    for number, row in parse_json_lines(path, lines):
        yield _check_row_is_object(row, FileLocation(path, number))


def _read_json_rows(path: Path, file: BinaryIO) -> Iterator[tuple[FileLocation, Row]]:
    content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise DataError(
            f"{format_path(path)} has more than {MAX_JSON_BYTES:,} bytes: write it as JSON Lines, "
            "which is read row by row"
        )
    text = decode_text(content, path)
    try:
        rows = parse_json(text, path)
    except FileError:
        if not text.lstrip().startswith("{"):
            raise
        yield from _read_jsonl_rows(path, io.BytesIO(content))  # JSON Lines under this name
        return
    if isinstance(rows, dict):  # one row alone
        rows = [rows]
    if not isinstance(rows, list):
        raise DataError(
            f"{format_path(path)} is {format_value(rows)}, but must be an array of objects"
        )
    for number, row in enumerate(rows):
        yield _check_row_is_object(row, FileLocation(path, number, "row"))


def _check_row_is_object(value: Any, location: FileLocation) -> tuple[FileLocation, Row]:
    if not isinstance(value, dict):
        raise DataError(f"{location} is {format_value(value)}, but must be an object")
    return location, value


def _read_csv_rows(path: Path, file: BinaryIO) -> Iterator[tuple[FileLocation, Row]]:
    return _read_separated_rows(path, file, SEPARATORS)


def _read_tsv_rows(path: Path, file: BinaryIO) -> Iterator[tuple[FileLocation, Row]]:
    return _read_separated_rows(path, file, "\t")


def _read_separated_rows(
    path: Path, file: BinaryIO, separators: str
) -> Iterator[tuple[FileLocation, Row]]:
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        lines = _read_lines(path, text)
        header, number = next(lines, ""), 1
        separator = max(separators, key=_QUOTED.sub("", header).count)
        try:
            columns = [c.strip() for c in next(csv.reader([header], delimiter=separator), [])]
            _check_column_names(path, columns)
            reader = csv.DictReader(lines, columns, delimiter=separator, strict=True)
            for row in reader:
                number = reader.line_num + 1
                if None in row or None in row.values():
                    raise DataError(
                        f"{FileLocation(path, number)}: the header has {len(columns)} columns, but "
                        "this row has another number"
                    )
                yield FileLocation(path, number), row
        except csv.Error as error:
            raise DataError(f"{FileLocation(path, number)}: {error}") from None


def _read_lines(path: Path, text: io.TextIOWrapper) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: text.readline(MAX_LINE_BYTES + 1), ""), 1):
        if len(line) > MAX_LINE_BYTES:
            raise DataError(f"{FileLocation(path, number)} has more than {MAX_LINE_BYTES} bytes")
        yield line


def _check_column_names(path: Path, columns: Sequence[str]) -> None:
    duplicate = next((name for name in columns if columns.count(name) > 1), None)
    if duplicate is not None:
        raise DataError(
            f"{FileLocation(path, 1)}: the column {format_value(duplicate)} stands twice"
        )


def _read_document_chunks(path: Path, file: BinaryIO) -> Iterator[tuple[FileLocation, Row]]:
    """Read a text file as rows of document chunks."""
    from data.document_chunks import CHUNK_CHARACTERS, DocumentChunkRow, split_into_chunks

    number = 1
    with io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        for chunk_text, chunk in split_into_chunks(iter(lambda: text.read(CHUNK_CHARACTERS), "")):
            yield FileLocation(path, number), DocumentChunkRow(chunk_text, chunk)
            number += chunk_text.count("\n")


def _read_parquet_rows(path: Path, file: BinaryIO) -> Iterator[tuple[FileLocation, Row]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            number = 0
            for batch in opened.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield FileLocation(path, number, "row"), row_without_arrow_nulls(row)
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{format_path(path)} is not a Parquet file: {format_name(str(error))}"
        ) from None


def read_class_names(path: Path, column: str) -> tuple[str, ...] | None:
    """Read a ClassLabel column's names from Parquet metadata; None if there are none."""
    import pyarrow
    from pyarrow import parquet

    if data_suffix(path) != ".parquet":
        return None
    try:
        metadata = parquet.read_schema(path).metadata or {}
        features = json.loads(metadata.get(b"huggingface", b"{}"))
        names = features["info"]["features"][column]["names"]
    except (OSError, ValueError, LookupError, TypeError, pyarrow.ArrowException):
        return None  # who reads the rows says what is wrong with the file
    return tuple(names) if all(isinstance(name, str) for name in names) else None


READERS: dict[str, Callable[[Path, BinaryIO], Iterator[tuple[FileLocation, Row]]]] = {
    ".jsonl": _read_jsonl_rows,
    ".json": _read_json_rows,
    ".csv": _read_csv_rows,
    ".tsv": _read_tsv_rows,
    ".txt": _read_document_chunks,
    ".parquet": _read_parquet_rows,
}
