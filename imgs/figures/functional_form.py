"""Figure of a graph before and after functionalization: a call changes half of a variable."""

from __future__ import annotations

from imgs.style import ACTIVATION, COMPUTE, PLAIN, WEIGHT, Area, Canvas

STATEMENTS = (
    ("head = slice_(w, 0, 4)", "a view: shows half of w"),
    ("call(update, head, g)", "adds g to head, and so to w"),
    ("y = w * 2", "reads the new w"),
)
LEFT, RIGHT, HIGH, STEP = 16, 420, 30, 62


def draw() -> Canvas:
    canvas = Canvas(400)
    canvas.head((LEFT, 20), "What the program writes")
    canvas.head((RIGHT - 44, 20), "Its functional form")
    for i, (statement, remark) in enumerate(STATEMENTS):
        top = 60 + 96 * i
        canvas.box(Area(LEFT, top, 250, HIGH), statement, PLAIN)
        canvas.note((LEFT, top + 46), remark, "left")
    _draw_dataflow(canvas)
    canvas.note((LEFT, 372), "w is one place in memory,\nwhich statements change in turn.", "left")
    return canvas


def _draw_dataflow(canvas: Canvas) -> None:
    value, node = 110, 150
    w = canvas.box(Area(RIGHT - 44, 44, value, HIGH), "w", WEIGHT)
    steps = (
        ("view slice", "head"),
        ("call update", "head'1"),
        ("write slice", "w'1"),
        ("mul by 2", "y"),
    )
    before = w
    ops = []
    for i, (words, result) in enumerate(steps):
        top = 60 + 48 + STEP * i
        op = canvas.box(Area(RIGHT + 40, top, node, HIGH), words, COMPUTE)
        style = WEIGHT if result.startswith("w") else ACTIVATION
        out = canvas.box(Area(RIGHT + 240, top, value, HIGH), result, style)
        canvas.arrow((op.right, op.middle[1]), (out.left, out.middle[1]))
        if i == 0:
            canvas.arrow((w.right, w.middle[1]), (op.middle[0], w.middle[1]),
                         (op.middle[0], op.top))  # fmt: skip
        else:
            y = op.top - (STEP - HIGH) / 2
            canvas.arrow((before.middle[0], before.bottom), (before.middle[0], y),
                         (op.middle[0], y), (op.middle[0], op.top))  # fmt: skip
        before = out
        ops.append(op)
    write = ops[2]
    x = w.middle[0]
    canvas.arrow((x, w.bottom), (x, write.middle[1]), (write.left, write.middle[1]))
    canvas.note((RIGHT - 44, 372), "Each value is bound once. The graph returns w'1 as well:\n"
                "the w that the next run is given.", "left")  # fmt: skip
