"""A disk that is full, as the kernel shows it to all programs and libraries of this process."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(room: int = 20_000) -> Iterator[None]:
    """No file grows past so many bytes in the context: writing more fails with EFBIG.

    Nor is bytecode written: Python does not see that a file of it was cut, and fails to read it.
    """
    before, writes_none = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes_none
