"""Benchmarks that run themselves in several processes of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from config.errors import UserError


def in_processes(count: int, module: str, *arguments: str) -> Any:
    """What `python3 -m MODULE ARGUMENTS` prints in `count` processes, read as JSON.

    Raises:
        UserError: a process ended with an error.
    """
    starter = [sys.executable, "-m", "popdist.run", "--processes", str(count), "--"]
    done = subprocess.run(
        [*starter, sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise UserError(f"a process of {count} ended with an error, which stands above")
    return json.loads(done.stdout)
