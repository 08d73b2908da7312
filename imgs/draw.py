"""Draw the figures of the documentation.

    python3 -m imgs.draw [FOLDER]

writes each module of `imgs.figures` as a PNG file of its name, into `imgs/` unless told otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from imgs.style import Canvas

HERE = Path(__file__).parent


def draw_figures() -> Mapping[str, Canvas]:
    """Draw all figures of the documentation; returns the canvases by file name."""
    names = sorted(path.stem for path in (HERE / "figures").glob("[a-z]*.py"))
    return {name: import_module(f"imgs.figures.{name}").draw() for name in names}


def main() -> None:
    """Draw all figures of the documentation and write them as PNG files."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, canvas in draw_figures().items():
        canvas.save(folder / f"{name}.png")


if __name__ == "__main__":
    main()
