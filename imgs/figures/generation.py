"""Figure of generation with KV caches: work per prompt, and work per token."""

from __future__ import annotations

from itertools import pairwise

from imgs.style import ACTIVATION, COMPUTE, EMPTY, EXCHANGE, PLAIN, Area, Canvas

PROMPT, NEW, WRITTEN = 6, 4, 2  # slots of a cache; of the new ones, those before this position
SLOT, HEIGHT, CACHES = 22, 30, 300
T5, GPTJ, LOOP = 62, 222, 600  # tops of the families, left edge of the loop


def draw() -> Canvas:
    canvas = Canvas(314)
    canvas.head((16, 20), "read the prompts, once")
    canvas.head((CACHES, 20), "keys and values")
    canvas.head((LOOP, 20), "for each new token")
    _draw_prompt_pass(canvas, T5, "FLAN-T5", "encoder")
    _draw_prompt_pass(canvas, GPTJ, "GPT-J", "all layers")
    canvas.note((CACHES, T5 - 14), "of the encoder's output, for each layer", "left")
    _draw_cache(canvas, CACHES, T5, PROMPT)
    canvas.note((CACHES, T5 + 56), "of the answer, for each layer", "left")
    _draw_cache(canvas, CACHES, T5 + 70, 0, NEW)
    canvas.note((CACHES, GPTJ - 14), "of prompt and answer, for each layer", "left")
    _draw_cache(canvas, CACHES, GPTJ, PROMPT, NEW)
    _draw_loop(canvas)
    canvas.legend((CACHES, 292), [(ACTIVATION, "there", 80), (COMPUTE, "written now", 120),
                                  (EMPTY, "empty", 0)])  # fmt: skip
    return canvas


def _draw_prompt_pass(canvas: Canvas, y: float, family: str, layers: str) -> None:
    canvas.text((16, y - 14), family, align="left", weight="bold")
    prompts = canvas.box(Area(16, y, 92, HEIGHT), "prompts", PLAIN)
    read = canvas.box(Area(136, y, 112, HEIGHT), layers, COMPUTE)
    y = read.middle[1]
    canvas.arrow((prompts.right, y), (read.left, y))
    canvas.arrow((read.right, y), (CACHES - 4, y))


def _draw_cache(canvas: Canvas, x: float, y: float, prompt: int, new: int = 0) -> None:
    """Draw a KV cache with a slot for each token of the prompt and each new token."""
    kinds = [ACTIVATION] * (prompt + (WRITTEN if new else 0))
    if new:
        kinds += [COMPUTE] + [EMPTY] * (new - WRITTEN - 1)
    for i, style in enumerate(kinds):
        canvas.box(Area(x + i * SLOT, y, SLOT, HEIGHT), style=style)


def _draw_loop(canvas: Canvas) -> None:
    steps = (
        ("token", PLAIN, 30),
        ("(decoder) layers: write its\nkey and value, read all", COMPUTE, 48),
        ("logits, own part of the\nvocabulary", COMPUTE, 48),
        ("⇄ best token of all parts", EXCHANGE, 30),
    )
    y, areas = 48.0, []
    for words, style, height in steps:
        areas.append(canvas.box(Area(LOOP, y, 190, height), words, style))
        y += height + 18
    for above, below in pairwise(areas):
        canvas.arrow((above.middle[0], above.bottom), (below.middle[0], below.top))
    first, last, x = areas[0], areas[-1], LOOP + 206
    back = (last.right, last.middle[1]), (x, last.middle[1]), (x, first.middle[1])
    canvas.arrow(*back, (first.right, first.middle[1]))
    canvas.note(
        (LOOP, y + 16), "until all answers are complete;\nthe loop runs on the device", "left"
    )
