"""Figure of the phases of a T5 training step, in order of execution."""

from __future__ import annotations

from itertools import pairwise

from imgs.style import (
    ACTIVATION,
    COMPUTE,
    EXCHANGE,
    GRADIENT,
    MOMENT,
    PLAIN,
    Area,
    BoxStyle,
    Canvas,
)

# The program's phases, forwards, and what the figure calls them.
PHASES = {
    "embeddings": "embed-\ndings",
    "first_encoder_layer": "first\nencoder\nlayer",
    "encoder_block": "encoder\nblock\n× (L − 1)",
    "encoder_head": "encoder\nhead",
    "decoder_embeddings": "decoder\nembed-\ndings",
    "first_decoder_layer": "first\ndecoder\nlayer",
    "decoder_block": "decoder\nblock\n× (L − 1)",
}
HEAD = "head"
OWNERS = [name for name in PHASES if name != "decoder_embeddings"] + [HEAD]
WIDTH, GAP, HEIGHT, LEFT = 76, 13, 60, 108
FORWARD, BACKWARD, UPDATE = 46, 148, 268  # tops


def draw() -> Canvas:
    canvas = Canvas(386)
    for y, words in ((FORWARD, "forward"), (BACKWARD, "backward"), (UPDATE, "update")):
        canvas.head((16, y - 22), words)
    batch = canvas.box(Area(16, FORWARD, WIDTH, HEIGHT), "batch\nfrom the\nhost", ACTIVATION)
    norm = canvas.box(Area(16, BACKWARD, WIDTH, HEIGHT), "⇄ global\nnorm", EXCHANGE)
    forwards = [canvas.box(_phase_area(n, FORWARD), w, COMPUTE) for n, w in PHASES.items()]
    backwards = [canvas.box(_phase_area(n, BACKWARD), w, GRADIENT) for n, w in PHASES.items()]
    right = forwards[-1].right + GAP
    loss = Area(right, FORWARD, 814 - right, BACKWARD + HEIGHT - FORWARD)
    canvas.box(loss, "head:\nloss\nand its\ngradient", COMPUTE)
    _draw_arrows(canvas, [batch, *forwards, loss], FORWARD)
    _draw_arrows(canvas, [loss, *reversed(backwards), norm], BACKWARD)
    _draw_updates(canvas, norm)
    return canvas


def _phase_area(name: str, top: float) -> Area:
    return Area(LEFT + list(PHASES).index(name) * (WIDTH + GAP), top, WIDTH, HEIGHT)


def _draw_arrows(canvas: Canvas, areas: list[Area], top: float) -> None:
    """Draw an arrow from each area of the figure to the next one."""
    y = top + HEIGHT / 2
    for start, end in pairwise(areas):
        rightwards = start.left < end.left
        ends = (start.right, end.left) if rightwards else (start.left, end.right)
        canvas.arrow(*((x, y) for x in ends))


def _draw_updates(canvas: Canvas, norm: Area) -> None:
    """Draw the AdamW updates of those phases of the model that have weights."""
    areas = [
        canvas.box(Area(LEFT + i * (WIDTH + GAP), UPDATE, WIDTH, HEIGHT), words, style)
        for i, (words, style) in enumerate(_variable_owners())
    ]
    first = Area(16, UPDATE, WIDTH, HEIGHT)
    canvas.box(first, "learning\nrate from\nthe host", PLAIN)
    _draw_arrows(canvas, [first, *areas], UPDATE)
    x = norm.right - 5
    canvas.arrow((x, norm.bottom), (x, UPDATE))
    words = (
        "The decoder's embeddings use the encoder's weight, which is updated once.\n"
        "L is the number of layers of a stack."
    )
    canvas.note((16, UPDATE + HEIGHT + 34), words, "left")


def _variable_owners() -> list[tuple[str, BoxStyle]]:
    return [(PHASES.get(name, name), MOMENT) for name in OWNERS]
