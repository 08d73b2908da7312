"""Figure of T5's activation buffers: the rows that each phase reads and writes."""

from __future__ import annotations

from imgs.style import ACTIVATION, GRADIENT, INK, Area, BoxStyle, Canvas

LAYERS, MICRO_BATCHES = 3, 4
PHASE, ROW, GAP, LEFT = 82, 50, 14, 20  # widths, and the left edge
PITCH = PHASE + ROW + 2 * GAP
X, DX, CELL = 0, 44, 32  # of the two buffers below the top of a phase, and their height
ENCODER, DECODER = 58, 236  # tops
ADDED = 188  # height at which the gradients of the encoder's output meet
VALUE, GRAD = ACTIVATION.edge, GRADIENT.edge


def draw() -> Canvas:
    canvas = Canvas(394)
    canvas.head((LEFT, 20), f"T5 with {LAYERS} layers in each stack, {MICRO_BATCHES} micro-batches")
    ends = "embed-\ndings", "decoder\nembed-\ndings"
    for top, first, last, name in (
        (ENCODER, ends[0], "encoder\nhead", "encoder"),
        (DECODER, ends[1], "head:\nloss", "decoder"),
    ):
        names = [first, *(f"{name}\nlayer {i}" for i in range(LAYERS)), last]
        _draw_stack(canvas, top, names, rows=LAYERS + 2 if name == "encoder" else LAYERS + 1)
    _draw_gradient_arrows(canvas)
    _draw_output_arrows(canvas)
    canvas.legend(
        (LEFT, 372),
        [(ACTIVATION, "x: values, from left to right", 246),
         (GRADIENT, "dx: their gradients, from right to left", 0)],
    )  # fmt: skip
    return canvas


def _phase_area(index: int, top: float) -> Area:
    return Area(LEFT + index * PITCH, top, PHASE, DX + CELL)


def _row_area(index: int, top: float) -> Area:
    return Area(LEFT + index * PITCH + PHASE + GAP, top, ROW, CELL)


def _draw_stack(canvas: Canvas, top: float, names: list[str], rows: int) -> None:
    for i, name in enumerate(names):
        canvas.box(_phase_area(i, top), name)
    for i in range(rows):
        canvas.note((_row_area(i, top).middle[0], top - 12), f"row {i}")
        for below, style in ((X, ACTIVATION), (DX, GRADIENT)):
            _draw_cells(canvas, _row_area(i, top + below), style)
            forwards = style is ACTIVATION
            _draw_phase_arrow(
                canvas, i, _row_area(i, top + below), VALUE if forwards else GRAD, forwards
            )
            if i + 1 < len(names):
                _draw_phase_arrow(
                    canvas, i + 1, _row_area(i, top + below), VALUE if forwards else GRAD, forwards
                )


def _draw_phase_arrow(canvas: Canvas, phase: int, row: Area, colour: str, forwards: bool) -> None:
    """Draw the arrow between a phase and the activation row beside it."""
    y = row.middle[1]
    left = _phase_area(phase, 0).left
    ends = (left + PHASE, row.left) if left < row.left else (row.right, left)
    start, end = ends if forwards else ends[::-1]
    canvas.arrow((start, y), (end, y), colour=colour)


def _draw_cells(canvas: Canvas, area: Area, style: BoxStyle) -> None:
    """Draw an activation buffer row, with a cell for each micro-batch."""
    width = area.width / MICRO_BATCHES
    for entry in range(MICRO_BATCHES):
        canvas.box(Area(area.left + entry * width, area.top, width, area.height), style=style)


def _draw_gradient_arrows(canvas: Canvas) -> None:
    """Draw the arrows of decoder layers that add to the gradient of the encoder's output."""
    last = _row_area(LAYERS + 1, ENCODER + DX).middle[0]
    layers = [_phase_area(i + 1, DECODER).middle[0] for i in range(LAYERS)]
    for x in layers:
        canvas.arrow((x, DECODER), (x, ADDED), colour=GRAD, head=False)
    bottom = _row_area(LAYERS + 1, ENCODER + DX).bottom
    canvas.arrow((layers[0], ADDED), (last, ADDED), (last, bottom), colour=GRAD)
    words = "each decoder layer adds to the gradient of the encoder's output"
    canvas.note((layers[0] + 8, ADDED - 12), words, "left", color=INK)


def _draw_output_arrows(canvas: Canvas) -> None:
    """Draw arrows from the encoder's output to the decoder layers that read it."""
    output = _row_area(LAYERS + 1, ENCODER)
    bus, right = DECODER + DX + CELL + 24, output.right + 12
    y = output.middle[1]
    first = _phase_area(1, DECODER).middle[0]
    canvas.arrow(
        (output.right, y), (right, y), (right, bus), (first, bus), colour=VALUE, head=False
    )
    for i in range(LAYERS):
        x = _phase_area(i + 1, DECODER).middle[0]
        canvas.arrow((x, bus), (x, DECODER + DX + CELL), colour=VALUE)
    canvas.note((right - 8, bus + 15), "the encoder's output: row 4 of its x", "right", color=INK)
