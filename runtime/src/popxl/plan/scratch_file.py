"""Scratch files to measure a disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from popxl._storage.scratch_files import ScratchFile


@contextmanager
def scratch_file(
    folder: str | os.PathLike[str], count: int, nbytes: int
) -> Iterator[tuple[ScratchFile, int]]:
    """Context with a temporary scratch file for disk measurements; yields it and its slot size.

    `file.write(i * slot, data)` and `file.read(i * slot, data)` are thread-safe.

    Args:
        count: number of entries.
        nbytes: bytes of an entry.

    Raises:
        DiskError: the folder is in use, or the disk is full.
    """
    from popxl._storage.scratch_files import ScratchFolder, padded_bytes

    scratch = ScratchFolder.open_shared(folder)
    file = scratch.create_file(count * padded_bytes(nbytes))
    try:
        yield file, padded_bytes(nbytes)
    finally:
        file.close()
        scratch.close()
