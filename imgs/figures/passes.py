"""Figure of a step in one, two and four passes: order of layers, and saved activations."""

from __future__ import annotations

from collections.abc import Iterator

from imgs.style import EXCHANGE, MEMBERS, WIDTH, Area, Canvas

LAYERS, MICRO_BATCHES = "ABC", 4
PER_PASS = {4: "One pass of 4", 2: "Two passes of 2", 1: "Four passes of 1"}
LEFT, PANEL, CELL, ROW = 46, 265, 10, 24  # the first panel, from one to the next, and a cell
TOP, FLOOR, HEIGHT = 56, 196, 4  # of the cells, of the bars, and of what one layer saves

Work = tuple[int, int, int]
"""A layer, a micro-batch, and by how much what is saved grows."""


def draw() -> Canvas:
    canvas = Canvas(296)
    for panel, per_pass in enumerate(PER_PASS):
        _draw_panel(canvas, LEFT + panel * PANEL, per_pass)
    for layer, name in enumerate(LAYERS):
        canvas.text((LEFT - 18, _layer_y(layer) + ROW / 2 - 1), name, weight="bold")
    words = [(style, f"micro-batch {i + 1}", 140) for i, style in enumerate(MEMBERS)]
    canvas.legend((LEFT, 272), [*words, (EXCHANGE, "saved activations", 140)])
    canvas.note((WIDTH - 14, 272), "time →", "right")
    return canvas


def _draw_panel(canvas: Canvas, left: float, per_pass: int) -> None:
    passes = MICRO_BATCHES // per_pass
    canvas.head((left, 20), PER_PASS[per_pass])
    saved = max_saved = 0
    for slot, (layer, micro_batch, more) in enumerate(list_computations(per_pass)):
        x = left + slot * CELL
        canvas.box(Area(x, _layer_y(layer), CELL - 1, ROW - 3), style=MEMBERS[micro_batch])
        saved, max_saved = saved + more, max(max_saved, saved + more)
        if saved:
            canvas.box(Area(x, FLOOR - saved * HEIGHT, CELL - 1, saved * HEIGHT), style=EXCHANGE)
    width = 2 * len(LAYERS) * MICRO_BATCHES * CELL / passes
    for number in range(passes):
        start = left + number * width
        canvas.bracket((start + 1, TOP - 8), (start + width - 2, TOP - 8), -5)
    loads = 2 * len(LAYERS) * passes
    canvas.note((left, FLOOR + 20), f"at most {max_saved} saved; {loads} loads of a layer", "left")


def list_computations(per_pass: int) -> Iterator[Work]:
    """Yield the computations of a training step, in the order of their execution."""
    for first in range(0, MICRO_BATCHES, per_pass):
        members = range(first, first + per_pass)
        yield from ((layer, m, 1) for layer in range(len(LAYERS)) for m in members)
        yield from ((layer, m, -1) for layer in reversed(range(len(LAYERS))) for m in members)


def _layer_y(layer: int) -> float:
    """Returns the y, in pixels, of the row of a layer; the first layer's is the lowest."""
    return TOP + (len(LAYERS) - 1 - layer) * ROW
