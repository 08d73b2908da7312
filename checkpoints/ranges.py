"""Which stored chunks hold the wanted elements of a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from checkpoints.parts import Part, by_box, in_box


class StoredParts(NamedTuple):
    """What one stored tensor holds of a tensor.

    Attributes:
        each: elements of a chunk of it.
        parts: which elements of the tensor it holds, and where each part begins in it.
    """

    each: int
    parts: tuple[tuple[int, Part], ...]


@lru_cache(maxsize=1024)  # layers that are alike ask alike
def chunks_needed(
    wanted: tuple[Part, ...], spans: tuple[StoredParts, ...]
) -> tuple[tuple[int, ...], ...]:
    """The chunks of each stored tensor that hold an element of the wanted parts, in order."""
    (shape,) = {part.shape for span in spans for _, part in span.parts}
    is_wanted = _marked(shape, wanted)
    boxes: dict[object, np.ndarray] = {}
    needed = []
    for each, parts in spans:
        chunks: set[int] = set()
        for start, part in parts:
            box = part.axes, part.corner, part.box
            if box not in boxes:
                boxes[box] = in_box(is_wanted, *box).reshape(-1)
            inside = boxes[box][part.start : part.start + part.size]
            chunks.update(_chunks_with_any(inside, start, each))
        needed.append(tuple(sorted(chunks)))
    return tuple(needed)


def _marked(shape: tuple[int, ...], wanted: Iterable[Part]) -> np.ndarray:
    """Which elements of a tensor are in the parts."""
    mask = np.zeros(shape, np.bool_)
    for (axes, corner, box), parts in by_box(wanted).items():
        view = in_box(mask, axes, corner, box)
        inside = np.zeros(view.size, np.bool_)
        for part in parts:
            inside[part.start : part.start + part.size] = True
        view |= inside.reshape(box)
    return mask


def _chunks_with_any(inside: np.ndarray, start: int, each: int) -> Iterable[int]:
    """The chunks in which any of the consecutive elements from `start` on is marked."""
    if not inside.any():
        return ()
    first, last = start // each, (start + inside.size - 1) // each
    borders = [max(chunk * each - start, 0) for chunk in range(first, last + 1)]
    marked = np.logical_or.reduceat(inside, borders)
    return (first + np.flatnonzero(marked)).tolist()
