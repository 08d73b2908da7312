"""Figure of one layer in a training step: forward, backward and optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from imgs.style import (
    ACTIVATION,
    COMPUTE,
    EXCHANGE,
    GRADIENT,
    MOMENT,
    PLAIN,
    WEIGHT,
    Area,
    BoxStyle,
    Canvas,
)  # fmt: skip

WIDTH, GAP, INSET = 256, 15, 9  # of a column


@dataclass(frozen=True)
class Action:
    """A box of the figure: an action and the kind of its data."""

    words: str
    style: BoxStyle
    repeated: bool = False  # for each micro-batch


LOAD = Action("↓ load own parts of the weights", WEIGHT)
GATHER = Action("⇄ all-gather: whole weights", EXCHANGE)
COLUMNS = {
    "Forward: layers 0 … L−1": (
        LOAD,
        GATHER,
        Action("↓ load x, row i", ACTIVATION, True),
        Action("compute the layer", COMPUTE, True),
        Action("↑ store its output as x, row i + 1", ACTIVATION, True),
    ),
    "Backward: layers L−1 … 0": (
        LOAD,
        GATHER,
        Action("↓ load x, row i, and dx, row i + 1", ACTIVATION, True),
        Action("compute the layer again", COMPUTE, True),
        Action("compute its gradients,\nadd the weights' to accumulators", COMPUTE, True),
        Action("↑ store dx, row i", GRADIENT, True),
        Action("⇄ reduce-scatter: own parts of\nthe mean gradient", EXCHANGE),
        Action("↑ store them, float32", GRADIENT),
    ),
    "Update: after all gradients": (
        LOAD,
        Action("↓ load own parts of the gradient", GRADIENT),
        Action("↓ load own parts of the moments", MOMENT),
        Action("AdamW, after clipping by the\nnorm of all gradients", COMPUTE),
        Action("↑ store own parts of the weights", WEIGHT),
        Action("↑ store own parts of the moments", MOMENT),
    ),
}


REMARKS = {
    0: "With --activations keep, the forward\npass also stores what the gradient\n"
    "needs, and the backward pass loads\nit instead of computing it again.",
    2: "Nothing is gathered: a device updates\nthe parts that it stores.",
}


def draw() -> Canvas:
    canvas = Canvas(456)
    for column, (title, actions) in enumerate(COLUMNS.items()):
        x = 16 + column * (WIDTH + GAP)
        canvas.head((x, 20), title)
        bottom = _draw_column(canvas, x, actions)
        if column in REMARKS:
            canvas.note((x, bottom + 12), REMARKS[column], "left", va="top")
    canvas.note(
        (16, 438),
        "↓ from host memory to the device     ↑ from the device to host memory     "
        "⇄ between devices",
        "left",
    )
    return canvas


def _draw_column(canvas: Canvas, x: float, actions: tuple[Action, ...]) -> float:
    """Draw boxes of actions below each other; returns the y of the last one's lower edge."""
    y, loop = 44.0, None
    for i, action in enumerate(actions):
        if action.repeated and loop is None:
            canvas.note((x + INSET, y + 14), "for each micro-batch:", "left")
            loop, y = y, y + 28
        height = 44 if "\n" in action.words else 30
        inset = INSET if action.repeated else 0
        area = Area(x + inset, y, WIDTH - 2 * inset, height)
        canvas.box(area, action.words, action.style)
        y += height + 7
        last = i + 1 == len(actions) or not actions[i + 1].repeated
        if loop is not None and action.repeated and last:
            canvas.box(Area(x, loop, WIDTH, y - loop + 2), style=PLAIN)
            y += 9
    return y
