"""Small images of digits, drawn from a seed: data for programs that learn something."""

from __future__ import annotations

import numpy as np

# Five rows of three pixels for each digit, as on a seven-segment display.
_GLYPHS = (
    "### #.# #.# #.# ###", "..# ..# ..# ..# ..#", "### ..# ### #.. ###", "### ..# ### ..# ###",
    "#.# #.# ### ..# ..#", "### #.. ### ..# ###", "### #.. ### #.# ###", "### ..# ..# ..# ..#",
    "### #.# ### #.# ###", "### #.# ### ..# ###",
)  # fmt: skip
SIDE = 8
PIXELS = SIDE * SIDE
CLASSES = len(_GLYPHS)


def digits(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """`count` noisy images, a little out of place. More images of a seed begin with the same ones.

    Returns:
        Images float32 (count, 64) with values around 0 and 1; labels int32 (count,).
    """
    rng = np.random.default_rng(seed)
    images, labels = np.zeros((count, PIXELS), np.float32), np.zeros(count, np.int32)
    for i in range(count):
        images[i], labels[i] = _digit(rng)
    return images, labels


def _digit(rng: np.random.Generator) -> tuple[np.ndarray, int]:
    label, down, right = rng.integers(0, [CLASSES, 2, 2])
    image = rng.normal(0, 0.25, (SIDE, SIDE))
    glyph = np.array([[c == "#" for c in row] for row in _GLYPHS[label].split()])
    image[1 + down : 6 + down, 2 + right : 5 + right] += glyph
    return image.ravel(), int(label)
