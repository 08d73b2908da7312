"""Figure of data × tensor parallelism: the grid of replicas with its rows and columns."""

from __future__ import annotations

from imgs.style import MEMBERS, Area, Canvas

COPIES, SHARDS = 2, 4  # data_parallel, tensor_parallel
LEFT, TOP, WIDTH, HEIGHT, GAP = 128, 66, 118, 66, 10


def replica_index(copy: int, shard: int) -> int:
    """Returns the number of the replica with this data-parallel copy and tensor shard."""
    return copy * SHARDS + shard


def draw() -> Canvas:
    canvas = Canvas(298)
    canvas.head((20, 20), f"data_parallel = {COPIES}, tensor_parallel = {SHARDS}: 8 replicas")
    for shard in range(SHARDS):
        x = LEFT + shard * (WIDTH + GAP)
        canvas.text((x + WIDTH / 2, 50), f"shard {shard}", weight="bold")
        for copy in range(COPIES):
            area = Area(x, TOP + copy * (HEIGHT + GAP), WIDTH, HEIGHT)
            words = f"replica {replica_index(copy, shard)}\ndata of copy {copy}"
            canvas.box(area, words, MEMBERS[shard])
    for copy in range(COPIES):
        y = TOP + copy * (HEIGHT + GAP) + HEIGHT / 2
        canvas.text((20, y), f"copy {copy} of\nthe model", align="left", weight="bold")
    right, bottom = LEFT + SHARDS * (WIDTH + GAP) - GAP, TOP + COPIES * (HEIGHT + GAP) - GAP
    canvas.bracket((right + 6, TOP), (right + 6, bottom), 8)
    words = "A column holds the\nsame shard of each\nlayer."
    canvas.text((right + 26, TOP + 14), words, align="left", va="top")
    words = "⇄ mean of gradients,\nonce per layer\nand step"
    canvas.note((right + 26, TOP + 74), words, "left", va="top")
    canvas.bracket((LEFT, bottom + 6), (right, bottom + 6), 8)
    words = "A row computes each layer together, on the same samples."
    canvas.text((LEFT, bottom + 32), words, align="left")
    canvas.note(
        (LEFT, bottom + 54),
        "⇄ sums of activations, in each layer and micro-batch",
        "left",
    )
    return canvas
