"""metrics.jsonl: one JSON object per optimizer step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

Row = dict[str, float]


class MetricsFile:
    """Appends rows to a file, which it opens for each: readers see every row, nothing to close."""

    def __init__(self, path: Path, first_step: int = 0) -> None:
        """Make the file ready for a run that starts at `first_step`.

        Rows of that step and later ones, which a run left that is now resumed from before them,
        are dropped: the resumed run writes them again.
        """
        kept = [row for row in read_metrics(path) if row["step"] < first_step]
        draft = path.with_suffix(".tmp")
        draft.write_text("".join(_line(row) for row in kept), encoding="utf-8")
        os.replace(draft, path)
        self._path = path

    def append(self, row: Mapping[str, float]) -> None:
        """Write one row; it must have a `step`."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(row))


def read_metrics(path: Path) -> list[Row]:
    """The rows of a file, none if it does not exist.

    A last line that a killed run left incomplete is passed over.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [_row(line) for line in lines[:-1]]  # after the last newline stands what is incomplete


def column(rows: Sequence[Row], name: str) -> list[float]:
    """One value of each row, nan where the row lacks it."""
    return [row.get(name, math.nan) for row in rows]


def _line(row: Mapping[str, float]) -> str:
    # JSON has no nan or inf; as text they survive, and `float` reads them back.
    plain = {
        name: value if math.isfinite(value) else str(float(value)) for name, value in row.items()
    }
    return json.dumps(plain) + "\n"


def _row(line: str) -> Row:
    return {
        name: float(value) if isinstance(value, str) else value
        for name, value in json.loads(line).items()
    }
