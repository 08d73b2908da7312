"""Style of the documentation's figures: canvas in pixels, colors by meaning, one font size.

A canvas remembers what was drawn where, so that a test can tell whether words overlap, leave their
box or are crossed by a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as Outline
from matplotlib.text import Text
from PIL import Image  # comes with matplotlib

WIDTH = 830  # of a README on GitHub, pixels
SHARPNESS = 2  # pixels of the picture for each of those, as dense screens have
COLOURS = 64  # of a picture: a few, and what lies between them at the edges of letters
POINTS = 72 / 100  # of type for each pixel, at 100 pixels an inch

BODY, HEAD = 13, 15  # sizes of type, pixels
RAISED = 1.4  # so that lower-case letters look centred
INK, MUTED, LINE = "#1f2328", "#57606a", "#6e7781"
PAPER = "#ffffff"


@dataclass(frozen=True)
class BoxStyle:
    """Colors of a box: fill, edge and text."""

    fill: str
    edge: str
    ink: str = INK


# Okabe and Ito's colours (https://jfly.uni-koeln.de/color/), which all eyes tell apart, and tints
# of them, which words can be read on.
WEIGHT = BoxStyle("#cfe4f4", "#0072b2")
ACTIVATION = BoxStyle("#fdeabf", "#b97a00")
GRADIENT = BoxStyle("#f9d5c0", "#d55e00")
MOMENT = BoxStyle("#f1d9e7", "#b05a8a")
COMPUTE = BoxStyle("#c6ebdf", "#00805d")
EXCHANGE = BoxStyle("#3d4654", "#3d4654", "#ffffff")
PLAIN = BoxStyle(PAPER, LINE)
EMPTY = BoxStyle(PAPER, "#c2c8cf")
MEMBERS = (WEIGHT, ACTIVATION, COMPUTE, MOMENT)  # where colours tell devices apart

Point = tuple[float, float]


@dataclass(frozen=True)
class Area:
    """A rectangle of a figure, in pixels from the top left corner."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    @property
    def middle(self) -> Point:
        return self.left + self.width / 2, self.top + self.height / 2


@dataclass
class Canvas:
    """A figure `WIDTH` pixels wide; y grows downwards.

    Attributes:
        words: what is written.
        boxes: the rectangles that are drawn; words are inside one or outside.
        lines: the corners of each arrow and line, which cross no words.
        curves: the points of each curve, which crosses none either.
    """

    height: float
    words: list[Text] = field(default_factory=list)
    boxes: list[Area] = field(default_factory=list)
    lines: list[Sequence[Point]] = field(default_factory=list)
    curves: list[Sequence[Point]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.figure = Figure(figsize=(WIDTH / 100, self.height / 100), dpi=100, facecolor=PAPER)
        self._pixels = FigureCanvasAgg(self.figure)  # no pyplot: nothing global, no display
        self._axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(self.height, 0))
        self._axes.axis("off")

    # ---- what can be drawn ----------------------------------------------------------------------
    def text(
        self, at: Point, words: str, size: float = BODY, align: str = "center", **look: Any
    ) -> None:
        """Write text at a point, with horizontal alignment `align`."""
        level = "center" if "rotation" in look else "center_baseline"
        look = {"color": INK, "va": level, "linespacing": 1.25, **look}
        x, y = at[0], at[1] - (0 if "rotation" in look else RAISED)
        drawn = self._axes.text(x, y, words, size=size * POINTS, ha=align, zorder=4, **look)
        self.words.append(drawn)

    def head(self, at: Point, words: str) -> None:
        """Write the title of a part of the figure, left-aligned at a point."""
        self.text(at, words, HEAD, "left", weight="bold")

    def note(self, at: Point, words: str, align: str = "center", **look: Any) -> None:
        """Write a small annotation at a point."""
        self.text(at, words, align=align, **{"color": MUTED, **look})

    def box(
        self,
        area: Area,
        words: str = "",
        style: BoxStyle = PLAIN,
        dashed: bool = False,
        **look: Any,
    ) -> Area:
        """Draw a rectangle with centered text; returns the rectangle."""
        shape = FancyBboxPatch(
            (area.left, area.top),
            area.width,
            area.height,
            boxstyle=f"round,pad=0,rounding_size={min(4, area.width / 4, area.height / 4)}",
            facecolor=style.fill,
            edgecolor=style.edge,
            linestyle=(0, (3, 2)) if dashed else "-",
            linewidth=1,
            zorder=1 if style is PLAIN else 2,
        )
        self._axes.add_patch(shape)
        self.boxes.append(area)
        if words:
            self.text(area.middle, words, **{"color": style.ink, **look})
        return area

    def arrow(self, *corners: Point, colour: str = LINE, head: bool = True) -> None:
        """Draw a line through `corners`, with an arrowhead at its end."""
        self.lines.append(corners)
        self._axes.add_patch(
            FancyArrowPatch(
                path=Outline(corners),
                arrowstyle="-|>,head_length=5,head_width=2.6" if head else "-",
                shrinkA=0,
                shrinkB=0,
                color=colour,
                linewidth=1.4,
                joinstyle="miter",
                capstyle="butt",
                zorder=3,
            )
        )

    def curve(self, points: Sequence[Point], style: BoxStyle, dashed: bool = False) -> None:
        """Draw a curve through points: solid with dots, or dashed without."""
        self.curves.append(points)
        self._axes.plot(
            *zip(*points, strict=True),
            color=style.edge,
            linestyle=(0, (3, 2)) if dashed else "-",
            linewidth=1.4,
            marker="" if dashed else "o",
            markersize=3.5,
            zorder=3,
        )

    def bracket(self, start: Point, end: Point, depth: float) -> None:
        """Draw a square bracket from `start` to `end`, `depth` pixels to one side."""
        (x0, y0), (x1, y1) = start, end
        across, down = (0, depth) if y0 == y1 else (depth, 0)
        inner = (x0 + across, y0 + down), (x1 + across, y1 + down)
        self.arrow(start, *inner, end, head=False)

    def legend(self, at: Point, entries: Sequence[tuple[BoxStyle, str, float]]) -> None:
        """Draw a legend; each entry is a style, its text and its width in pixels."""
        x, y = at
        for style, meaning, room in entries:
            self.box(Area(x, y - 7, 20, 14), style=style)
            self.note((x + 27, y), meaning, "left")
            x += room

    # ---- the file -------------------------------------------------------------------------------
    def save(self, path: Path) -> None:
        """Write a PNG file with the most frequent colors."""
        self.figure.set_dpi(100 * SHARPNESS)
        self._pixels.draw()
        picture = Image.fromarray(np.asarray(self._pixels.buffer_rgba())[..., :3])
        picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
