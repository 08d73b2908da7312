"""metrics.jsonl: one JSON object per optimizer step."""

from __future__ import annotations

import errno
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from config.errors import Notice
from files.errors import FileError
from files.json_files import parse_json
from files.shown import shown_path
from files.text import decoded
from files.writing import write_file, writing

Row = dict[str, float]
Sample = Mapping[str, str]
"""What a model wrote while it was trained: prompt, generated, expected."""
SAMPLES = "samples"
"""The key of samples in a line, the only one whose value is no number."""


class MetricsFile:
    """Appends rows to a file, which it opens for each: readers see every row, nothing to close."""

    def __init__(self, path: Path, first_step: int = 0) -> None:
        """Make the file ready for a run that has done `first_step` steps.

        Rows of later steps are dropped: the resumed run writes them again. Damaged lines go to a
        file next to it, and a notice says so.

        Raises:
            WriteError: the file cannot be written.
        """
        good, damaged = _read(path)
        if damaged:
            _set_aside(path, damaged)
        kept = b"".join(line + b"\n" for row, line in good if row["step"] <= first_step)
        write_file("the metrics", path, lambda draft: draft.write_bytes(kept))
        self._path = path

    def append(self, row: Mapping[str, float], samples: Sequence[Sample] = ()) -> None:
        """Write one row, whole or not at all; it must have a `step`.

        Args:
            samples: written as the row's `samples`, if there are any.

        Raises:
            WriteError: it cannot be written.
        """
        with writing("the metrics", self._path), self._path.open("ab", buffering=0) as file:
            before = file.tell()
            line = _line(row, samples).encode()
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):
                    file.truncate(before)
                raise


def read_metrics(path: Path) -> list[Row]:
    """The rows of a file, none if it does not exist; damaged lines are skipped.

    Raises:
        OSError: the file is there, but cannot be read.
    """
    return [row for row, _ in _read(path).good]


def column(rows: Sequence[Row], name: str) -> list[float]:
    """One value of each row, nan where the row lacks it."""
    return [row.get(name, math.nan) for row in rows]


class _Content(NamedTuple):
    good: list[tuple[Row, bytes]]
    damaged: list[bytes]


def _read(path: Path) -> _Content:
    """The rows of a file, and its damaged lines. An incomplete last line, which a killed run left,
    is neither.
    """
    content = _Content([], [])
    if path.exists():
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            row = _row(line, path, number)
            if row is None:
                content.damaged.append(line)
            else:
                content.good.append((row, line))
    return content


def _set_aside(path: Path, lines: Sequence[bytes]) -> None:
    aside = path.with_name(f"{path.stem}.damaged{path.suffix}")
    with writing("what is damaged of the metrics", aside), aside.open("ab") as file:
        file.writelines(line + b"\n" for line in lines)
    warnings.warn(
        f"{len(lines)} damaged line{'s' if len(lines) > 1 else ''} of {shown_path(path)} "
        f"went to {aside.name}; the others are kept",
        Notice,
        stacklevel=2,
    )


def _line(row: Mapping[str, float], samples: Sequence[Sample]) -> str:
    # JSON has no nan or inf; as text they survive, and `float` reads them back.
    plain = {
        name: value if math.isfinite(value) else str(float(value)) for name, value in row.items()
    }
    return json.dumps({**plain, SAMPLES: [*samples]} if samples else plain) + "\n"


def _row(line: bytes, path: Path, number: int) -> Row | None:
    """The row that a line holds, or None if it holds none."""
    try:
        row = parse_json(decoded(line, path, number), path, number)
        if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
            return None
        return {name: _number(value) for name, value in row.items() if name != SAMPLES}
    except (FileError, ValueError, OverflowError):
        return None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a number")
    return float(value) if isinstance(value, str) or abs(value) > 2**63 else value
