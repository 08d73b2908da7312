"""A file as entries on disk are in, to measure a disk with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from popxl._lower.disk import Scratch, ScratchFile


@contextmanager
def scratch_file(folder: str | os.PathLike[str], nbytes: int) -> Iterator[ScratchFile]:
    """A file in a folder of scratch, which is removed afterwards.

    `file.write(offset, bytes)` and `file.read(offset, nbytes)` are thread-safe; offsets are whole
    pages.

    Raises:
        DiskError: the folder is in use, or the disk is full.
    """
    scratch = Scratch.opened(folder)
    file = scratch.file(nbytes)
    try:
        yield file
    finally:
        file.close()
        scratch.close()
