"""Figure of replicated tensor sharding on the grid of replicas: groups that share tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from imgs.figures.replica_grid import COPIES, SHARDS, replica
from imgs.style import ACTIVATION, MOMENT, WEIGHT, Area, BoxStyle, Canvas

WIDTH, HEIGHT, GAP, PANEL = 58, 46, 3, 272
PASS = "Gathered once per layer and pass."
REMARK = "A cell is a replica: 0 to 3 above, 4 to 7 below, as in the grid of copies and shards."


@dataclass(frozen=True)
class Sharing:
    """A kind of tensor: `holds(copy, shard)` returns a replica's tensor and its shard of it."""

    title: str
    kind: BoxStyle
    tensor: str
    holds: Callable[[int, int], tuple[int | None, int]]
    remark: str


# Weights that tensor parallelism cuts are alike in a column of the grid, activations in a row.
SHARINGS = (
    Sharing(
        "tensor-parallel weights",
        WEIGHT,
        "shard",
        lambda copy, shard: (shard, copy),
        "Column: the copies that hold\nthe same shard keep a part each.\n" + PASS,
    ),
    Sharing(
        "other large weights",
        MOMENT,
        "",
        lambda copy, shard: (None, replica(copy, shard)),
        "All replicas hold them alike\nand keep a part each.\n" + PASS,
    ),
    Sharing(
        "activations between layers",
        ACTIVATION,
        "copy",
        lambda copy, shard: (copy, shard),
        "Row: one copy's devices hold\nthe same and keep a part each.\n"
        "Gathered for each micro-batch.",
    ),
)


def draw() -> Canvas:
    canvas = Canvas(262)
    for i, sharing in enumerate(SHARINGS):
        _panel(canvas, 16 + i * PANEL, sharing)
    canvas.note((16, 240), REMARK, "left")
    return canvas


def _panel(canvas: Canvas, left: float, sharing: Sharing) -> None:
    canvas.head((left, 20), sharing.title)
    for copy in range(COPIES):
        for shard in range(SHARDS):
            tensor, part = sharing.holds(copy, shard)
            words = f"part {part}"
            if tensor is not None:
                words = f"{sharing.tensor} {tensor}\n{words}"
            at = left + shard * (WIDTH + GAP), 44 + copy * (HEIGHT + GAP)
            canvas.box(Area(*at, WIDTH, HEIGHT), words, sharing.kind)
    canvas.text((left, 156), sharing.remark, align="left", va="top")
