"""Location of a value in a file, for messages."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from files.formatting import format_path


class FileLocation(NamedTuple):
    """Path and line (or row) number of a value; formatted only for a message."""

    path: Path | str
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{format_path(self.path)}, {self.unit} {self.number}"
