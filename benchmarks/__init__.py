"""Benchmarks, one command each: `python3 -m benchmarks.NAME`; helpers that start processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.errors import UserError

ROOT = Path(__file__).parent.parent
ERROR_CHARACTERS = 300
"""Characters of an error that are shown, the last ones."""


def run_in_processes(count: int, module: str, *arguments: str) -> Any:
    """Run `python3 -m MODULE ARGUMENTS` in `count` processes; returns the JSON of process 0.

    Raises:
        UserError: a process ended with an error.
    """
    launcher = [sys.executable, "-m", "popdist.run", "--processes", str(count), "--"]
    done = subprocess.run(
        [*launcher, sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise UserError(f"one of {count} processes ended with the error above")
    return json.loads(done.stdout)


def run_module(arguments: Sequence[str], timeout: float) -> dict[str, Any]:
    """Run `python3 -m ARGUMENTS` and return the JSON object that it prints last.

    Raises:
        RuntimeError: it failed, with the last line of its output.
        TimeoutError: it took more than `timeout` seconds.
    """
    command = [sys.executable, "-m", *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, timeout=timeout, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"stopped after {timeout:.0f} s, for lack of time") from None
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RuntimeError((lines or [f"exit code {done.returncode}"])[-1][-ERROR_CHARACTERS:])
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def run_script(script: str, *arguments: str) -> None:
    """Run one of the repository's scripts; raises UserError if it fails."""
    done = subprocess.run([sys.executable, str(ROOT / script), *arguments], cwd=ROOT, check=False)
    if done.returncode:
        raise UserError(f"{script} {' '.join(arguments)} ended with exit code {done.returncode}")


def read_metric(folder: Path, name: str) -> float:
    """Returns a validation metric from the file eval.json in a run folder."""
    report = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
    return float(report[name])
