"""metrics.jsonl: one JSON object per optimizer step."""

from __future__ import annotations

import errno
import json
import math
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from config.errors import UserNotice
from files.atomic_writing import write_errors, write_file
from files.errors import FileError
from files.formatting import format_path
from files.json_files import parse_json
from files.text_files import decode_text

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
        damaged: list[bytes] = []

        def write(draft: Path) -> None:
            with draft.open("wb") as file:
                for row, line in _lines(path):
                    if row is None:
                        damaged.append(line)
                    elif row["step"] <= first_step:
                        file.write(line)
            if damaged:
                _set_aside(path, damaged)

        write_file("the metrics", path, write)
        self._path = path

    def append(self, row: Mapping[str, float], samples: Sequence[Sample] = ()) -> None:
        """Write one row, whole or not at all; it must have a `step`.

        Args:
            samples: written as the row's `samples`, if there are any.

        Raises:
            WriteError: it cannot be written.
        """
        with write_errors("the metrics", self._path), self._path.open("ab", buffering=0) as file:
            before = file.tell()
            line = _line(row, samples).encode()
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):
                    file.truncate(before)
                raise


def read_metrics(path: Path, names: Collection[str] | None = None) -> list[Row]:
    """The rows of a file, none if it does not exist; damaged lines are skipped, and
    those of one step, such as what is known of the last save, are one row.

    Args:
        names: of the values to keep in memory; None: all.

    Raises:
        OSError: the file is there, but cannot be read.
    """
    steps: dict[float, Row] = {}
    for row, _ in _lines(path):
        if row is not None:
            kept = row if names is None else {name: row[name] for name in names if name in row}
            steps.setdefault(row["step"], {}).update(kept)
    return list(steps.values())


def column(rows: Sequence[Row], name: str) -> list[float]:
    """One value of each row, nan where the row lacks it."""
    return [row.get(name, math.nan) for row in rows]


def _lines(path: Path) -> Iterator[tuple[Row | None, bytes]]:
    """Each line of a file with its row, None for a damaged one. An incomplete last line, which a
    killed run left, is neither.
    """
    if path.exists():
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield _row(line[:-1], path, number), line


def _set_aside(path: Path, lines: Sequence[bytes]) -> None:
    aside = path.with_name(f"{path.stem}.damaged{path.suffix}")
    with write_errors("what is damaged of the metrics", aside), aside.open("ab") as file:
        file.writelines(lines)
    warnings.warn(
        f"{len(lines)} damaged line{'s' if len(lines) > 1 else ''} of {format_path(path)} "
        f"went to {aside.name}; the others are kept",
        UserNotice,
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
        row = parse_json(decode_text(line, path, number), path, number)
        if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
            return None
        return {name: _number(value) for name, value in row.items() if name != SAMPLES}
    except (FileError, ValueError, OverflowError):
        return None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a number")
    return float(value) if isinstance(value, str) or abs(value) > 2**63 else value
