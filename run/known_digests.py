"""Digests of a model's weights, known from an earlier start while its files stay as they are.

To hash a teacher of 70 B parameters reads 140 GB. The files count as unchanged if their paths,
sizes, inodes, and the times of the last change of content and inode are the same: the latter is set
by the kernel at every write and replacement, from the clock of the system.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from files.atomic_writing import write_file_atomically, write_json
from files.errors import FileError, WriteError
from files.json_files import read_json_object
from run.frozen_outputs import json_sha256
from terminal.screen import is_first_process, say

FORMAT = 1
"""Version of the digests: of how weights are read, too."""

MIN_AGE = 2.0
"""Seconds since the last change of a file after which another one has another time."""


@dataclass(frozen=True)
class KnownDigests:
    """Digests of the weights in some files, stored for the next start.

    Attributes:
        path: where they are stored.
        files: the files of the weights.
        before: state of the files, from before they were opened.
    """

    path: Path
    files: Sequence[Path]
    before: Mapping[str, Sequence[int]]

    @classmethod
    def for_files(cls, folder: Path, key: Any, files: Sequence[Path]) -> KnownDigests:
        """Return those of files that are about to be opened.

        Args:
            folder: where they are stored.
            key: JSON values on which they depend besides the files.
        """
        state = _stat_files(files)
        name = json_sha256([FORMAT, key, *sorted(state)])[:32]
        return cls(folder / f"{name}.digests", files, state)

    def read(self) -> dict[str, str]:
        """Return the stored digests by weight name; none if the files have changed."""
        try:
            stored = read_json_object(self.path)
            if stored.data.get("files") == self._file_stats:
                return stored.get_text_dict("sha256")
        except FileError:
            pass
        return {}

    def write(self, sha256: Mapping[str, str]) -> None:
        """Store digests, unless the files have changed meanwhile or a moment before."""
        if (
            not is_first_process()
            or self.read() == sha256
            or _stat_files(self.files) != self.before
        ):
            return
        newest = max(state[-1] for state in self.before.values())  # no time is after it
        if time.time() - newest / 1e9 < MIN_AGE:
            return
        content = {"files": self._file_stats, "sha256": dict(sha256)}
        try:
            write_file_atomically(
                "the digests to", self.path, lambda draft: write_json(draft, content)
            )
        except WriteError as error:
            say(f"warning: {error}; the next start reads all weights")

    @property
    def _file_stats(self) -> dict[str, list[int]]:
        """State of the files as JSON has it."""
        return {name: list(state) for name, state in self.before.items()}


def _stat_files(files: Sequence[Path]) -> dict[str, Sequence[int]]:
    """Return what changes with the content of files: device, inode, size, times; ctime last."""
    stats = {str(path.absolute()): path.stat() for path in files}
    return {
        name: (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        for name, s in stats.items()
    }
