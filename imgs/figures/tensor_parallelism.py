"""Figure of a tensor-parallel matmul: its weight sharded by columns or rows over two devices."""

from __future__ import annotations

from imgs.style import EXCHANGE, MEMBERS, PLAIN, WIDTH, Area, Canvas

MIDDLE = 116  # of the matrices, downwards


def draw() -> Canvas:
    canvas = Canvas(272)
    _draw_column_parallel(canvas, 20)
    canvas.arrow((WIDTH / 2 - 33, 14), (WIDTH / 2 - 33, 218), head=False)
    _draw_row_parallel(canvas, 410)
    canvas.legend(
        (20, 250),
        [(MEMBERS[0], "on device 0", 130), (MEMBERS[1], "on device 1", 130),
         (PLAIN, "the same on both", 170)],
    )  # fmt: skip
    return canvas


def _draw_column_parallel(canvas: Canvas, x: float) -> None:
    canvas.head((x, 20), "Cut by columns: no exchange")
    canvas.box(Area(x, MIDDLE - 35, 90, 70), "X", PLAIN)
    canvas.text((x + 108, MIDDLE), "×", HEAD_SIZE)
    for member in range(2):
        area = Area(x + 126 + 46 * member, MIDDLE - 45, 46, 90)
        canvas.box(area, f"W{SUB[member]}", MEMBERS[member])
    canvas.text((x + 236, MIDDLE), "=", HEAD_SIZE)
    for member in range(2):
        area = Area(x + 254 + 46 * member, MIDDLE - 35, 46, 70)
        canvas.box(area, f"Y{SUB[member]}", MEMBERS[member])
    canvas.note((x, 210), "Each device has some columns of Y = X W.", "left")


def _draw_row_parallel(canvas: Canvas, x: float) -> None:
    canvas.head((x, 20), "Cut by rows: a sum over the devices")
    for member in range(2):
        canvas.box(Area(x + 44 * member, MIDDLE - 35, 44, 70), f"Y{SUB[member]}", MEMBERS[member])
        area = Area(x + 122, MIDDLE - 44 + 44 * member, 60, 44)
        canvas.box(area, f"V{SUB[member]}", MEMBERS[member])
        part = Area(x + 216, MIDDLE - 65 + 68 * member, 60, 60)
        canvas.box(part, f"Y{SUB[member]}V{SUB[member]}", MEMBERS[member])
        canvas.arrow((part.right, part.middle[1]), (x + 290, part.middle[1]))
    canvas.text((x + 105, MIDDLE), "×", HEAD_SIZE)
    canvas.text((x + 199, MIDDLE), "=", HEAD_SIZE)
    total = canvas.box(Area(x + 290, MIDDLE - 65, 34, 128), "⇄ all-reduce", EXCHANGE, rotation=90)
    result = canvas.box(Area(x + 340, MIDDLE - 35, 60, 70), "Z", PLAIN)
    canvas.arrow((total.right, MIDDLE), (result.left, MIDDLE))
    canvas.note((x, 210), "Y₀V₀ + Y₁V₁ = Y V. Both devices get the sum.", "left")


HEAD_SIZE = 18
SUB = "₀₁"
