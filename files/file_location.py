"""Where something stands in a file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from files.formatting import format_path


class FileLocation(NamedTuple):
    """A line or row of a file. It is put into words where a message is printed: there is one for
    each row that is read, and hardly ever a message."""

    path: Path | str
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{format_path(self.path)}, {self.unit} {self.number}"
