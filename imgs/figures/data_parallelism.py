"""Figure of data parallelism: copies of the model, each with its part of the batch."""

from __future__ import annotations

from imgs.style import ACTIVATION, COMPUTE, EXCHANGE, GRADIENT, WEIGHT, Area, Canvas

COPIES = 2
TOP, ROW, HEIGHT = 44, 92, 74


def draw() -> Canvas:
    canvas = Canvas(258)
    for x, title in ((20, "global batch"), (150, "copies of the model"), (468, "gradients"),
                     (716, "update")):  # fmt: skip
        canvas.head((x, 20), title)
    bar = Area(596, TOP, 96, ROW + HEIGHT)
    canvas.box(bar, "⇄ mean\n\nonce per\nlayer and\nstep", EXCHANGE)
    for copy in range(COPIES):
        _draw_model_copy(canvas, copy, bar)
    canvas.note(
        (20, 236),
        "All copies hold equal weights, make the same update, and so stay equal.",
        "left",
    )
    return canvas


def _draw_model_copy(canvas: Canvas, copy: int, bar: Area) -> None:
    y = TOP + copy * ROW
    samples = canvas.box(Area(20, y, 104, HEIGHT), f"samples of\ncopy {copy}", ACTIVATION)
    model = canvas.box(Area(150, y, 290, HEIGHT), style=WEIGHT)
    canvas.text((model.left + 48, model.middle[1]), f"copy {copy}\nall layers", weight="bold")
    work = Area(model.left + 104, y + 12, 174, HEIGHT - 24)
    canvas.box(work, "forwards, backwards\nover its micro-batches", COMPUTE)
    grads = canvas.box(Area(468, y, 104, HEIGHT), "gradient of\nits samples", GRADIENT)
    update = canvas.box(Area(716, y, 94, HEIGHT), "equal\nupdate", WEIGHT)
    for start, end in ((samples, model), (model, grads), (grads, bar), (bar, update)):
        canvas.arrow((start.right, grads.middle[1]), (end.left, grads.middle[1]))
