"""Shards of logical tensors, as replicas hold them: a process saves and reads its own alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, groupby
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Axes, corner and shape, as in `Part`."""


@dataclass(frozen=True)
class Part:
    """Consecutive elements of a box that is cut out of a tensor.

    Attributes:
        shape: of the tensor.
        axes: the order in which the box has the tensor's axes.
        corner, box: where the box begins, and its shape, with its axes in that order.
        start, size: which elements of the box, in C order.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    corner: tuple[int, ...]
    box: tuple[int, ...]
    start: int
    size: int

    @property
    def place(self) -> Box:
        """The box."""
        return self.axes, self.corner, self.box

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> Part:
        """All of a tensor."""
        axes = tuple(range(len(shape)))
        return cls(shape, axes, (0,) * len(shape), shape, 0, math.prod(shape))


Layout = tuple[Part, ...]
"""All parts of a tensor, those of a box one after the other. Tensors that are cut alike have the
same object."""


@dataclass(frozen=True)
class CutTensor:
    """A named tensor, cut into parts that are on several processes.

    Attributes:
        name: of the tensor.
        dtype: its.
        layout: its parts.
        holders: for each part the processes that hold it; the same object for tensors cut alike.
        read: gives the elements of one of the parts, [size], on a process that holds it.
    """

    name: str
    dtype: np.dtype
    layout: Layout
    holders: tuple[tuple[int, ...], ...]
    read: Callable[[int], np.ndarray]


@runtime_checkable
class ShardSource(Protocol):
    """Tensors that can be had in parts."""

    def parts(self) -> Iterable[CutTensor]:
        """All tensors, in the same order on all processes."""


def assembled(
    shape: tuple[int, ...], dtype: np.dtype, parts: Mapping[Part, Callable[[], np.ndarray]]
) -> np.ndarray:
    """The tensor that parts make up; where none is, it is 0.

    Args:
        parts: what gives the elements of each.
    """
    whole = np.zeros(shape, dtype)
    for place, inside in _by_box(parts).items():
        view = _in_box(whole, place)
        if inside[0].size == view.size:
            values = parts[inside[0]]()
        else:
            values = np.zeros(view.size, dtype)
            for part in inside:
                values[part.start : part.start + part.size] = parts[part]()
        view[...] = values.reshape(view.shape)
    return whole


def with_starts(parts: Iterable[Part]) -> Iterator[tuple[int, Part]]:
    """Parts that lie one after the other, each with the number of elements before it."""
    start = 0
    for part in parts:
        yield start, part
        start += part.size


def check_whole(parts: Collection[Part]) -> None:
    """Check that parts are one whole tensor, each element once.

    Raises:
        ValueError: they are not.
    """
    shape = next(iter(parts)).shape
    boxes = _by_box(parts)
    for (axes, corner, box), inside in boxes.items():
        if any(part.start != start for start, part in with_starts(inside)):
            raise ValueError("its parts do not follow each other")
        if sum(part.size for part in inside) != math.prod(box):
            raise ValueError("not all of its parts are there")
        ends = (c + n for _, c, n in sorted(zip(axes, corner, box, strict=True)))
        if any(end > most for end, most in zip(ends, shape, strict=True)):
            raise ValueError("a part is outside of it")
    if any(part.shape != shape for part in parts):
        raise ValueError("its parts are of several tensors")
    if sum(math.prod(box) for _, _, box in boxes) != math.prod(shape):
        raise ValueError("not all of its parts are there")
    if any(_overlap(one, other) for one, other in combinations(boxes, 2)):
        raise ValueError("its parts overlap")


class StoredParts(NamedTuple):
    """Which elements of a tensor one stored array holds.

    Attributes:
        each: elements of a chunk of the array.
        parts: of the tensor, and where each begins in the array.
    """

    each: int
    parts: tuple[tuple[int, Part], ...]


@lru_cache(maxsize=1024)  # layers that are alike ask alike
def chunks_needed(
    wanted: tuple[Part, ...], stored: tuple[StoredParts, ...]
) -> tuple[tuple[int, ...], ...]:
    """The chunks of each stored array that hold an element of the wanted parts, in order."""
    (shape,) = {part.shape for one in stored for _, part in one.parts}
    is_wanted = marked(shape, wanted)
    boxes: dict[Box, np.ndarray] = {}
    needed = []
    for each, parts in stored:
        chunks: set[int] = set()
        for start, part in parts:
            if part.place not in boxes:
                boxes[part.place] = _in_box(is_wanted, part.place).reshape(-1)
            inside = boxes[part.place][part.start : part.start + part.size]
            chunks.update(_chunks_with_any(inside, start, each))
        needed.append(tuple(sorted(chunks)))
    return tuple(needed)


def marked(shape: tuple[int, ...], parts: Iterable[Part]) -> np.ndarray:
    """Bool array of a tensor's shape, true for the elements of the parts."""
    mask = np.zeros(shape, np.bool_)
    for place, in_one in _by_box(parts).items():
        view = _in_box(mask, place)
        inside = np.zeros(view.size, np.bool_)
        for part in in_one:
            inside[part.start : part.start + part.size] = True
        view |= inside.reshape(view.shape)
    return mask


def _chunks_with_any(inside: np.ndarray, start: int, each: int) -> Iterable[int]:
    """The chunks in which any of the consecutive elements from `start` on is marked."""
    if not inside.any():
        return ()
    first, last = start // each, (start + inside.size - 1) // each
    borders = [max(chunk * each - start, 0) for chunk in range(first, last + 1)]
    return (first + np.flatnonzero(np.logical_or.reduceat(inside, borders))).tolist()


def _in_box(tensor: np.ndarray, place: Box) -> np.ndarray:
    """A box of a tensor, as a view with the axes in the box's order."""
    axes, corner, box = place
    where: tuple[Any, ...] = (*(slice(c, c + n) for c, n in zip(corner, box, strict=True)), ...)
    return tensor.transpose(axes)[where]


def _by_box(parts: Iterable[Part]) -> dict[Box, list[Part]]:
    """The parts of each box, in order."""
    ordered = sorted(parts, key=lambda part: (part.place, part.start))
    return {place: list(inside) for place, inside in groupby(ordered, key=lambda p: p.place)}


def _overlap(one: Box, other: Box) -> bool:
    mine, theirs = (sorted(zip(*box, strict=True)) for box in (one, other))
    return all(
        a < b + length_b and b < a + length_a
        for (_, a, length_a), (_, b, length_b) in zip(mine, theirs, strict=True)
    )
