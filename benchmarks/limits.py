"""A hard limit of memory for processes: a control group where one can be made, else the kernel's
limit on what a process maps for itself."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOTS = (  # of control groups: the folder, and the file with the limit
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)
_STACKS = 2**30  # bytes that threads map and never touch


@contextmanager
def limited(nbytes: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """What limits memory, in words, and a function that a new process calls before anything else.

    In a control group all those processes together have so many bytes; what is resident counts, the
    page cache among it as far as the kernel cannot drop it. Without one, each has so many, and a
    gigabyte for the stacks of threads: its private memory counts, touched or not (RLIMIT_DATA).
    """
    group = _group(nbytes)
    if group is None:
        limit = nbytes + _STACKS
        yield "RLIMIT_DATA", lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return
    procs = group / "cgroup.procs"
    try:
        yield "a control group", lambda: _join(procs)
    finally:
        with suppress(OSError):  # a process that was killed may be going yet
            group.rmdir()


def _group(nbytes: int) -> Path | None:
    """A new control group with a limit; None where there can be none."""
    for root, file in _ROOTS:
        group = root / f"popxl-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(nbytes))
        except OSError:
            group.rmdir()
            continue
        return group
    return None


def _join(procs: Path) -> None:
    procs.write_text(str(os.getpid()))
