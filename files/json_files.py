"""Strict JSON reading, and typed access to the fields of JSON objects."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from files.errors import FileError
from files.file_location import FileLocation
from files.formatting import format_name, format_path, format_value
from files.text_files import MEBIBYTE, check_not_lfs_pointer, decode_text, read_text

MAX_LINE_BYTES = 16 * MEBIBYTE
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: Path, max_bytes: int = 64 * MEBIBYTE) -> Any:
    """Read a JSON file.

    Args:
        max_bytes: bytes above which it is refused.

    Raises:
        FileError: with file and line, if it is not JSON.
    """
    return parse_json(read_text(path, max_bytes), path)


def read_json_object(path: Path, max_bytes: int = 64 * MEBIBYTE) -> JsonObject:
    """Read a JSON file whose top level is an object. Raises as `read_json`."""
    return JsonObject(read_json(path, max_bytes), format_path(path))


def parse_json_lines(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
    """Parse JSON Lines; yields line number (from 1) and data, and skips blank lines.

    Args:
        path: of the file, for messages.
        lines: as iterating over a file opened in binary mode gives them, so that only line feeds
            end a line: U+2028 within a text does not.

    Raises:
        FileError: with file and line, for one that is not JSON.
    """
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_BYTES:
            raise FileError(f"{FileLocation(path, number)} has more than {MAX_LINE_BYTES} bytes")
        text = decode_text(line, path, number)
        if text.strip():
            yield number, parse_json(text.rstrip(), path, number)


def parse_json(text: str, path: Path, first_line: int = 1) -> Any:
    """Parse JSON strictly: no duplicate names, finite numbers, no lone surrogates.

    Args:
        path, first_line: where the text stands, for messages.

    Raises:
        FileError: with file and line.
    """
    location = FileLocation(path, first_line)
    check_not_lfs_pointer(path, text[:80].encode(errors="replace"))
    try:
        data = json.loads(
            text,
            object_pairs_hook=_reject_duplicate_keys,
            parse_float=_parse_finite_number,
            parse_constant=_reject_nan_and_infinity,
        )
        if _SURROGATE.search(text):
            json.dumps(data, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise FileError(f"{FileLocation(path, line)} is not JSON: {error.msg}") from None
    except UnicodeEncodeError:
        raise FileError(f"{location}: a text has half a character (a lone surrogate)") from None
    except RecursionError:
        raise FileError(f"{location} is nested too deep") from None
    except ValueError as error:  # also a number of more digits than Python reads
        reason = str(error).partition(";")[0]
        location_text = format_path(path) if "\n" in text.strip() else location
        raise FileError(f"{location_text} is not JSON: {format_name(reason)}") from None
    return data


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in data if names.count(name) > 1)
        raise ValueError(f"the name {format_value(duplicate)} stands twice")
    return data


def _parse_finite_number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {format_name(text)} is too large")
    return number


def _reject_nan_and_infinity(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


class JsonObject:
    """A JSON object with typed access to its fields, and with messages that locate them.

    Every method raises FileError, naming file and field, if the field is missing or of another
    kind.
    """

    def __init__(self, data: Any, location: str) -> None:
        """Stores the object and its location: a file, or a file and a dotted name in it."""
        if not isinstance(data, dict):
            raise FileError(f"{location} is {format_value(data)}, but must be an object")
        self.data: dict[str, Any] = data
        self._where = location

    def with_data(self, data: Mapping[str, Any]) -> JsonObject:
        """Create a JSON object of other data, with the same location in messages."""
        return JsonObject(dict(data), self._where)

    def get_text(self, name: str) -> str:
        """Read the field of this name as a string."""
        return self._get_typed(name, str, "text")

    def get_count(self, name: str) -> int:
        """Read the field of this name as an integer from 0 to 2^63 - 1."""
        value = self._value(name)
        if type(value) is not int or not 0 <= value < 2**63:
            raise self.error(name, "an integer, 0 or more")
        return value

    def get_number(self, name: str) -> float:
        """Read the field of this name as a finite number."""
        value = self._value(name)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(name, "a number")
        return float(value)

    def get_counts(self, name: str) -> list[int]:
        """Read the field of this name as a list of integers from 0 to 2^63 - 1."""
        values = self._get_typed(name, list, "a list of integers")
        if not all(type(value) is int and 0 <= value < 2**63 for value in values):
            raise self.error(name, "a list of integers, 0 or more")
        return values

    def get_texts(self, name: str) -> list[str]:
        """Read the field of this name as a list of strings."""
        values = self._get_typed(name, list, "a list of texts")
        if not all(isinstance(value, str) for value in values):
            raise self.error(name, "a list of texts")
        return values

    def get_object(self, name: str) -> JsonObject:
        """Read the field of this name as a JSON object."""
        return JsonObject(self._value(name), f"{self._where}: {format_name(name)}")

    def get_dict(self, name: str) -> dict[str, Any]:
        """Read the field of this name as a JSON object without typed access, a plain dict."""
        return self.get_object(name).data

    def get_objects(self, name: str) -> Mapping[str, JsonObject]:
        """Read the field of this name as a JSON object whose values are objects."""
        inner = self.get_object(name)
        return {key: inner.get_object(key) for key in inner.data}

    def get_object_list(self, name: str) -> list[JsonObject]:
        """Read the field of this name as a list of JSON objects."""
        values = self._get_typed(name, list, "a list of objects")
        return [
            JsonObject(v, f"{self._where}: {format_name(name)}[{i}]") for i, v in enumerate(values)
        ]

    def get_int_lists(self, name: str) -> list[list[int]]:
        """Read the field of this name as a list of lists of integers from 0."""
        values = self._get_typed(name, list, "a list of lists")
        lists = JsonObject(dict(enumerate(values)), f"{self._where}: {format_name(name)}")
        return [lists.get_counts(i) for i in lists.data]

    def get_text_dict(self, name: str) -> dict[str, str]:
        """Read the field of this name as a JSON object whose values are strings."""
        inner = self.get_object(name)
        return {key: inner.get_text(key) for key in inner.data}

    def __contains__(self, name: str) -> bool:
        return name in self.data

    def _get_typed(self, name: str, expected_type: type, noun: str) -> Any:
        value = self._value(name)
        if not isinstance(value, expected_type):
            raise self.error(name, noun)
        return value

    def _value(self, name: str) -> Any:
        if name not in self.data:
            raise FileError(f"{self._where}: {format_name(name)} is missing")
        return self.data[name]

    def error(self, name: str, noun: str) -> FileError:
        """Create the error for a field of the wrong type; `noun` completes "must be"."""
        value = format_value(self.data[name])
        return FileError(f"{self._where}: {format_name(name)} is {value}, but must be {noun}")
