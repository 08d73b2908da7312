"""Filter of standard output that drops the lines gloo prints for each connection."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress


def drop_gloo_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the lines of an output that gloo did not write.

    Each of its messages is `[Gloo] Rank ...`, then the end of a line. It writes them in pieces, and
    several threads at once, so that pieces of one may follow the beginning or the end of another:
    from the first beginning on, all is gloo's until as many lines have ended as messages began.
    """
    pending_ends = 0
    for line in lines:
        pending_ends += line.count(b"[Gloo]")
        if pending_ends:
            pending_ends -= 1
        else:
            yield line


class GlooOutputFilter:
    """Replaces file descriptor 1 by a pipe, and forwards all lines that gloo did not write.

    Python's own output goes past it. Other libraries and programs that are started meanwhile write
    to the descriptor.
    """

    def __init__(self) -> None:
        """Redirects file descriptor 1 and starts the filter thread."""
        sys.stdout.flush()
        reader, writer = os.pipe()
        self._out = os.dup(1)
        os.dup2(writer, 1)
        os.close(writer)
        old = sys.stdout
        sys.stdout = open(  # noqa: SIM115 - for as long as the process lives
            self._out, "w", encoding=old.encoding, errors=old.errors, closefd=False,
            buffering=1 if os.isatty(self._out) else -1,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._filter_lines, args=(reader,), daemon=True)
        self._thread.start()

    def _filter_lines(self, reader: int) -> None:
        with os.fdopen(reader, "rb") as lines, suppress(OSError):
            for line in drop_gloo_lines(lines):
                os.write(self._out, line)

    def close(self) -> None:
        """Restores file descriptor 1."""
        os.dup2(self._out, 1)
        self._thread.join(timeout=1)
