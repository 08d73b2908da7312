"""Programs in processes of their own, which one process has run in turn.

In one process two libraries disturb each other: threads of the one that has just worked go on
looking for work for a while, and take time from the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, Any

from config.errors import UserError

Facts = Mapping[str, Any]
"""What a program says of itself, as JSON has it."""


class Worker:
    """A program in another process, as a context.

    Args:
        name: for messages.
        command: starts a process that calls `serve`.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def facts(self) -> Facts:
        """What the program says when it is ready. To be read once, before the first run."""
        said: Facts = self._line()
        return said

    def run(self) -> float:
        """Run the program once; returns the seconds it took."""
        _pipe(self._process.stdin).write("run\n")
        _pipe(self._process.stdin).flush()
        return float(self._line()["seconds"])

    def _line(self) -> Any:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise UserError(f"{self.name!r} ended with exit code {self._process.wait()}")
        return json.loads(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._process.kill()
        self._process.communicate()  # closes its input, at whose end it ends


def serve(facts: Facts, program: Callable[[], float]) -> None:
    """Be the other side of a `Worker`, until it ends.

    Args:
        program: runs once and returns the seconds it took.
    """
    _say(facts)
    for _ in sys.stdin:
        _say({"seconds": program()})


def _say(facts: Facts) -> None:
    print(json.dumps(facts), flush=True)


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
