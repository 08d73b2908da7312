"""What docs/benchmarks.md says of an H200 is what its record says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "benchmarks/results/h200.json").read_text(encoding="utf-8"))
SECTION = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8").partition("### On an H200")[2]


@pytest.mark.parametrize("step", RECORD["steps"], ids=lambda step: step["preset"])
def test_steps(step: dict[str, Any]) -> None:
    seconds = (f"{step[name]:.2f} s" for name in ("seconds", "simulated"))
    bytes_ = (f"{step[f'{name}_device_bytes'] / 1e9:.2f} GB" for name in ("peak", "planned"))
    preset = f"`{step['preset']}`"
    assert f"| {' | '.join([preset, *seconds, *bytes_])} |" in SECTION
    assert 1.04 <= step["seconds"] / step["simulated"] < 1.085, "4 to 8 % longer"


@pytest.mark.parametrize("of", RECORD["kernels"], ids=lambda of: of["preset"])
def test_kernels(of: dict[str, Any]) -> None:
    def total(way: str, name: str) -> str:
        found = [v[name] for part, v in of["parts"].items() if part.endswith(way)]
        return f"{1e3 * sum(found):,.1f}"

    ways = ("/forward", "/backward", "")
    numbers = [total(way, name) for way in ways for name in ("seconds", "simulated")]
    (row,) = [r for r in SECTION.splitlines() if r.startswith(f"| `{of['preset']}`, ")]
    assert row.endswith(f" | {' | '.join(numbers)} |")
