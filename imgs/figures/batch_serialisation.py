"""Figure of gradient accumulation around layers and inside them: number of weight loads."""

from __future__ import annotations

from imgs.style import ACTIVATION, COMPUTE, WEIGHT, WIDTH, Area, Canvas

LAYERS, MICRO_BATCHES = "ABC", 4
MARGIN, LOAD, WORK = 20, 31, 34  # the width of a load and of a computation: not to scale


def draw() -> Canvas:
    canvas = Canvas(302)
    canvas.head((MARGIN, 20), "Accumulation around the layers: weights are loaded 12 times")
    end: float = MARGIN
    for micro_batch in range(MICRO_BATCHES):
        start = end
        for layer in LAYERS:
            end = _draw_load(canvas, end, 42, layer)
            end = _draw_micro_batch(canvas, end, 42, micro_batch)
        _draw_span(canvas, start, end, 90, f"micro-batch {micro_batch + 1}")
    canvas.head((MARGIN, 144), "Accumulation inside the layers: weights are loaded 3 times")
    end = MARGIN
    for layer in LAYERS:
        start = end
        end = _draw_load(canvas, end, 166, layer)
        for micro_batch in range(MICRO_BATCHES):
            end = _draw_micro_batch(canvas, end, 166, micro_batch)
        _draw_span(canvas, start, end, 214, f"layer {layer}")
    canvas.note(
        (end + 18, 180),
        "Activations between layers wait in\nhost memory, a row for each layer.",
        "left",
    )
    canvas.legend(
        (MARGIN, 278),
        [
            (WEIGHT, "load the weights of a layer", 225),
            (COMPUTE, "compute one micro-batch", 205),
            (ACTIVATION, "load its input, store its output", 240),
        ],
    )
    canvas.note((WIDTH - MARGIN, 278), "time →", "right")
    return canvas


def _draw_load(canvas: Canvas, x: float, y: float, layer: str) -> float:
    canvas.box(Area(x, y, LOAD - 2, 40), layer, WEIGHT, weight="bold")
    return x + LOAD


def _draw_micro_batch(canvas: Canvas, x: float, y: float, micro_batch: int) -> float:
    inside = y > 100  # the rows of activations belong to the order that needs them
    canvas.box(Area(x, y, WORK - 2, 30 if inside else 40), str(micro_batch + 1), COMPUTE)
    if inside:
        canvas.box(Area(x, y + 32, WORK - 2, 8), style=ACTIVATION)
    return x + WORK


def _draw_span(canvas: Canvas, start: float, end: float, y: float, words: str) -> None:
    canvas.bracket((start + 2, y - 4), (end - 4, y - 4), 5)
    canvas.note(((start + end) / 2 - 1, y + 14), words)
