"""Figure of replicated tensor sharding: replicas with equal tensors store a shard each."""

from __future__ import annotations

from collections.abc import Collection

from imgs.style import COMPUTE, EMPTY, EXCHANGE, GRADIENT, WEIGHT, Area, BoxStyle, Canvas

REPLICAS = 4
TOP, HEIGHT, ROW, PART = 60, 34, 46, 24
BOTTOM = TOP + (REPLICAS - 1) * ROW + HEIGHT
# Left edges of what stands in each row.
STORED, WHOLE, LOCAL, REDUCED = 96, 276, 504, 684
ALL = range(REPLICAS)


def draw() -> Canvas:
    canvas = Canvas(294)
    for x, title in ((STORED, "in host memory"), (WHOLE, "on the device"), (LOCAL, "its gradient"),
                     (REDUCED, "mean gradient")):  # fmt: skip
        canvas.head((x, 24), title)
    middle = (BOTTOM - TOP) / 2 + TOP
    for x, words, style in ((214, "⇄ all-gather", EXCHANGE), (406, "all micro-batches", COMPUTE),
                           (622, "⇄ reduce-scatter", EXCHANGE)):  # fmt: skip
        width = 66 if style == COMPUTE else 34
        area = canvas.box(Area(x, TOP, width, BOTTOM - TOP), style=style)
        canvas.text((area.middle[0], middle), words, color=style.ink, rotation=90)
    for replica in ALL:
        _draw_replica_row(canvas, replica)
    y = BOTTOM + 26
    canvas.arrow((REDUCED + 48, BOTTOM + 8), (REDUCED + 48, y), (STORED + 48, y),
                 (STORED + 48, BOTTOM + 8))  # fmt: skip
    canvas.note((413, y + 22), "AdamW: each replica updates the part that it stores, with its part "
                "of the gradient")  # fmt: skip
    return canvas


def _draw_replica_row(canvas: Canvas, replica: int) -> None:
    y = TOP + replica * ROW
    canvas.text((16, y + HEIGHT / 2), f"replica {replica}", align="left")
    _draw_tensor(canvas, STORED, y, {replica}, WEIGHT)
    _draw_tensor(canvas, WHOLE, y, ALL, WEIGHT)
    _draw_tensor(canvas, LOCAL, y, ALL, GRADIENT)
    _draw_tensor(canvas, REDUCED, y, {replica}, GRADIENT)
    width = REPLICAS * PART
    for start, end in ((STORED + width, 214), (248, WHOLE), (WHOLE + width, 406), (472, LOCAL),
                       (LOCAL + width, 622), (656, REDUCED)):  # fmt: skip
        canvas.arrow((start, y + HEIGHT / 2), (end, y + HEIGHT / 2))


def _draw_tensor(
    canvas: Canvas, x: float, y: float, stored_shards: Collection[int], style: BoxStyle
) -> None:
    for part in sorted(ALL, key=lambda part: part in stored_shards):  # those that are there on top
        has = part in stored_shards
        area = Area(x + part * PART, y, PART, HEIGHT)
        canvas.box(area, str(part) if has else "", style if has else EMPTY, dashed=not has)
