"""Parts of logical tensors, as replicas hold them: what a process saves without asking others."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Any, Protocol, runtime_checkable

import numpy as np


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


@runtime_checkable
class PartialReader(Protocol):
    """Tensors of which some elements can be had without the others."""

    def some(self, name: str, wanted: Sequence[Part]) -> np.ndarray:
        """A tensor with the elements of the parts `wanted`; the others may be 0 instead."""


def assembled(
    shape: tuple[int, ...], dtype: np.dtype, parts: Mapping[Part, Callable[[], np.ndarray]]
) -> np.ndarray:
    """The tensor that parts make up; where none is, it is 0.

    Args:
        parts: what gives the elements of each.
    """
    whole = np.zeros(shape, dtype)
    for (axes, corner, box), inside in by_box(parts).items():
        size = math.prod(box)
        if inside[0].size == size:
            values = parts[inside[0]]()
        else:
            values = np.zeros(size, dtype)
            for part in inside:
                values[part.start : part.start + part.size] = parts[part]()
        in_box(whole, axes, corner, box)[...] = values.reshape(box)
    return whole


def with_starts(parts: Iterable[Part]) -> Iterator[tuple[int, Part]]:
    """Parts that lie one after the other, each with the number of elements before it."""
    start = 0
    for part in parts:
        yield start, part
        start += part.size


def in_box(
    tensor: np.ndarray, axes: tuple[int, ...], corner: tuple[int, ...], box: tuple[int, ...]
) -> np.ndarray:
    """A box of a tensor, as a view with the axes in the box's order."""
    where: tuple[Any, ...] = (*map(_slice, corner, box), ...)
    return tensor.transpose(axes)[where]


def check_whole(parts: Collection[Part]) -> None:
    """Check that parts are one whole tensor, each element once.

    Raises:
        ValueError: they are not.
    """
    shape = next(iter(parts)).shape
    boxes = by_box(parts)
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


_Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Axes, corner and shape, as in `Part`."""


def by_box(parts: Iterable[Part]) -> dict[_Box, list[Part]]:
    """The parts of each box, in order."""

    def box(part: Part) -> _Box:
        return part.axes, part.corner, part.box

    ordered = sorted(parts, key=lambda part: (box(part), part.start))
    return {key: list(inside) for key, inside in groupby(ordered, key=box)}


def _overlap(one: _Box, other: _Box) -> bool:
    mine, theirs = (sorted(zip(*box, strict=True)) for box in (one, other))
    return all(
        a < b + length_b and b < a + length_a
        for (_, a, length_a), (_, b, length_b) in zip(mine, theirs, strict=True)
    )


def _slice(first: int, length: int) -> slice:
    return slice(first, first + length)
