"""Digests of saved steps, and damage to them."""

from __future__ import annotations

import json
from pathlib import Path


def digests(folder: Path) -> dict[str, str]:
    """Return the digests of weights and optimizer state in a step's manifest or record files."""
    content = json.loads((folder / "manifest.json").read_text())["content"]
    tables = [json.loads((folder / name).read_text()) for name in content["tables"]]
    records = [pair for table in (content, *tables) for pair in table["tensors"].items()]
    return {name: record["sha256"] for name, record in records}


def flip_in(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 16
    file.write_bytes(content)
