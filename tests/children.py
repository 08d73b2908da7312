"""Processes that tests start. What a test leaves running, as where it waits too long, ends with it:
it would take the processors from all others."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = ROOT / "tests" / "without_torch"
PYTHON_PATH = os.pathsep.join(map(str, (ROOT, ROOT / "runtime/src", WITHOUT_TORCH)))
"""What processes import that are as those of users: this project, and no torch."""

_SECONDS = 10.0  # for a launcher to end the processes that it has started
_started: list[subprocess.Popen[str]] = []


def child(command: Sequence[str | Path], **how: Any) -> subprocess.Popen[str]:
    """A process whose streams are pipes of text, unless `how`, for `subprocess.Popen`, says where
    they go."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes | how)
    _started.append(process)
    return process


def end_children() -> None:
    """End those that still run."""
    for process in _started:
        process.terminate()
    while _started:
        with _started.pop() as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS)
            process.kill()


def free_port() -> int:
    """A port of this host on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
