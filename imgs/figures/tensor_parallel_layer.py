"""Figure of tensor parallelism inside a transformer layer: sharded work and collectives."""

from __future__ import annotations

from imgs.style import EXCHANGE, MEMBERS, Area, Canvas

HALVES = {
    "Attention, cut by heads": (
        "q, k, v of its heads\n(columns of the weight)",
        "attention of\nits heads",
        "output projection\n(rows of the weight)",
    ),
    "Feed-forward, cut by inner features": (
        "its inner features\n(columns of the weight)",
        "gelu, and product\nof T5's branches",
        "output projection\n(rows of the weight)",
    ),
}
STAGES = (174, 146, 160)  # widths
LANE, GAP = 48, 8  # of a device
RULES = (
    ("", "forwards", "backwards"),
    ("open", "nothing: the value is the same on all", "⇄ all-reduce: sum of the gradients"),
    (
        "close",
        "⇄ all-reduce: sum of all parts",
        "nothing: the gradient is the same on all",
    ),
)


def draw() -> Canvas:
    canvas = Canvas(496)
    for i, (title, stages) in enumerate(HALVES.items()):
        _draw_half_layer(canvas, 12 + i * 176, title, stages)
    _draw_rules(canvas, 378)
    canvas.note(
        (16, 478),
        "An encoder layer of T5 is these two halves. GPT-J computes both between one open and "
        "one close.",
        "left",
    )
    return canvas


def _draw_half_layer(canvas: Canvas, top: float, title: str, stages: tuple[str, ...]) -> None:
    canvas.head((16, top + 8), title)
    y = top + 46
    middle = y + LANE + GAP / 2
    x = canvas.box(Area(16, middle - 17, 26, 34), "x")
    norm = canvas.box(Area(66, middle - 17, 54, 34), "norm")
    ends = (Area(left, y, 30, 2 * LANE + GAP) for left in (142, 706))
    opening = canvas.box(next(ends), "open", EXCHANGE, rotation=90)
    closing = canvas.box(next(ends), "close", EXCHANGE, rotation=90)
    plus = canvas.box(Area(758, middle - 14, 28, 28), "+")
    for member in range(2):
        _draw_device_lane(canvas, y + member * (LANE + GAP), member, stages, opening, closing)
    for start, end in ((x, norm), (norm, opening), (closing, plus)):
        canvas.arrow((start.right, middle), (end.left, middle))
    canvas.arrow((plus.right, middle), (818, middle))
    canvas.arrow((54, middle), (54, y - 14), (772, y - 14), (772, plus.top))


def _draw_device_lane(
    canvas: Canvas, y: float, member: int, stages: tuple[str, ...], first_box: Area, last_box: Area
) -> None:
    """Draw the work of one device as a row of boxes between its first and last box."""
    at, middle = first_box.right, y + LANE / 2
    for words, width in zip(stages, STAGES, strict=True):
        area = canvas.box(Area(at + 14, y, width, LANE), words, MEMBERS[member])
        canvas.arrow((at, middle), (area.left, middle))
        at = area.right
    canvas.arrow((at, middle), (last_box.left, middle))


def _draw_rules(canvas: Canvas, top: float) -> None:
    for i, (name, forwards, backwards) in enumerate(RULES):
        y = top + i * 32
        if name:
            canvas.box(Area(16, y - 13, 56, 26), name, EXCHANGE)
            canvas.legend((702, y), [(MEMBERS[i - 1], f"on device {i - 1}", 0)])
        weight = "normal" if name else "bold"
        canvas.text((86, y), forwards, align="left", weight=weight)
        canvas.text((384, y), backwards, align="left", weight=weight)
