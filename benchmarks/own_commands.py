"""The repository's commands, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from config.errors import UserError

ROOT = Path(__file__).parent.parent


def run(script: str, *arguments: str) -> None:
    """Run one of the repository's scripts. Raises UserError if it fails."""
    done = subprocess.run([sys.executable, str(ROOT / script), *arguments], cwd=ROOT, check=False)
    if done.returncode:
        raise UserError(f"{script} {' '.join(arguments)} ended with exit code {done.returncode}")


def metric(folder: Path, name: str) -> float:
    """What the validation in a folder found."""
    report = json.loads((folder / "validation.json").read_text(encoding="utf-8"))
    return float(report[name])
