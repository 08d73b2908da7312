"""Figure of replicated tensor sharding on the grid of replicas: groups that share tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from imgs.figures.replica_grid import COPIES, SHARDS, replica_index
from imgs.style import ACTIVATION, MOMENT, WEIGHT, Area, BoxStyle, Canvas

WIDTH, HEIGHT, GAP, PANEL = 58, 46, 3, 272
PASS = "Gathered once per layer and pass."
REMARK = "A cell is a replica: 0 to 3 above, 4 to 7 below, as in the grid of copies and shards."


@dataclass(frozen=True)
class TensorDistribution:
    """Distribution of one kind of tensor over the grid of replicas.

    Attributes:
        holds: (copy, shard) -> number of the replica's tensor, and of its shard of that tensor.
    """

    title: str
    style: BoxStyle
    tensor: str
    holds: Callable[[int, int], tuple[int | None, int]]
    remark: str


# Weights that tensor parallelism cuts are alike in a column of the grid, activations in a row.
DISTRIBUTIONS = (
    TensorDistribution(
        "tensor-parallel weights",
        WEIGHT,
        "shard",
        lambda copy, shard: (shard, copy),
        "Column: the copies that hold\nthe same shard keep a part each.\n" + PASS,
    ),
    TensorDistribution(
        "other large weights",
        MOMENT,
        "",
        lambda copy, shard: (None, replica_index(copy, shard)),
        "All replicas hold them alike\nand keep a part each.\n" + PASS,
    ),
    TensorDistribution(
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
    for i, distribution in enumerate(DISTRIBUTIONS):
        _draw_panel(canvas, 16 + i * PANEL, distribution)
    canvas.note((16, 240), REMARK, "left")
    return canvas


def _draw_panel(canvas: Canvas, left: float, distribution: TensorDistribution) -> None:
    canvas.head((left, 20), distribution.title)
    for copy in range(COPIES):
        for shard in range(SHARDS):
            tensor, part = distribution.holds(copy, shard)
            words = f"part {part}"
            if tensor is not None:
                words = f"{distribution.tensor} {tensor}\n{words}"
            at = left + shard * (WIDTH + GAP), 44 + copy * (HEIGHT + GAP)
            canvas.box(Area(*at, WIDTH, HEIGHT), words, distribution.style)
    canvas.text((left, 156), distribution.remark, align="left", va="top")
