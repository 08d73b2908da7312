"""Parts of logical tensors, as replicas hold them: what a process saves without asking others."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, combinations, groupby
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from modelling.weights import Row


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
class InParts(Protocol):
    """Tensors that can be had in parts."""

    def parts(self) -> Iterable[CutTensor]:
        """All tensors, in the same order on all processes."""


def assembled(parts: Mapping[Part, Callable[[], np.ndarray]]) -> np.ndarray:
    """The tensor that parts make up, which `check_whole` accepts.

    Args:
        parts: what gives the elements of each, all of one type.
    """
    first = next(iter(parts))
    whole: np.ndarray | None = None
    for (axes, corner, box), inside in _by_box(parts).items():
        pieces = [parts[part]() for part in inside]
        values = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
        whole = np.empty(first.shape, values.dtype) if whole is None else whole
        where: tuple[Any, ...] = (*map(_slice, corner, box), ...)
        whole.transpose(axes)[where] = values.reshape(box)
    assert whole is not None
    return whole


def check_whole(parts: Collection[Part]) -> None:
    """Check that parts are one whole tensor, each element once.

    Raises:
        ValueError: they are not.
    """
    shape = next(iter(parts)).shape
    boxes = _by_box(parts)
    for (axes, corner, box), inside in boxes.items():
        starts = accumulate((part.size for part in inside), initial=0)
        if any(part.start != start for part, start in zip(inside, starts, strict=False)):
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


def _by_box(parts: Iterable[Part]) -> dict[_Box, list[Part]]:
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


@dataclass(frozen=True)
class RowPart:
    """The elements of one weight among consecutive elements of a row's variable.

    Attributes:
        weight: which of the row's weights.
        part: where they are in it.
    """

    weight: int
    part: Part
    _start: int
    _middle: tuple[int, int, int, int]
    """First and last index on the axis along which weights are joined; length, elements inside."""

    def taken(self, values: np.ndarray) -> np.ndarray:
        """Them, of all those elements."""
        low, high, length, inner = self._middle
        if high - low == length:
            return values
        first, offset = divmod(self._start, length * inner)
        rows = -(-(offset + values.size) // (length * inner))
        filled = np.zeros(rows * length * inner, values.dtype)
        filled[offset : offset + values.size] = values
        chosen = filled.reshape(rows, length, inner)[:, low:high].reshape(-1)
        return chosen[_slice(self.part.start - first * (high - low) * inner, self.part.size)]


def parts_in_row(
    row: Row, shape: tuple[int, ...], group: int, start: int, size: int
) -> Iterator[RowPart]:
    """The elements of a row's weights among consecutive elements of its variable.

    Args:
        shape: of the variable on a replica.
        group: which of the tensor-parallel parts the variable is.
        start, size: which of its elements, in C order.
    """
    if not shape:
        scalar = Part((), (), (), (), 0, 1)
        yield from (RowPart(i, scalar, 0, (0, 1, 1, 1)) for i in range(len(row.weights)))
        return
    axis, count = row.axis or 0, len(row.weights)
    length, inner = shape[axis], math.prod(shape[axis + 1 :])
    for number, weight in enumerate(row.weights):
        box = list(reversed(weight.shape) if row.transpose else weight.shape)
        corner = [0] * len(box)
        corner[axis] = group * (length // count)
        box[axis] = max(min(length // count, box[axis] - corner[axis]), 0)  # without the padding
        low = number * (length // count)
        high = low + box[axis]

        def before(element: int, low: int = low, high: int = high) -> int:
            """How many elements of the weight come before one of the variable."""
            rows, rest = divmod(element, length * inner)
            return (rows * (high - low) + min(max(rest // inner - low, 0), high - low)) * inner + (
                rest % inner if low <= rest // inner < high else 0
            )

        first, end = before(start), before(start + size)
        if end > first:
            axes = range(len(box))
            order = tuple(reversed(axes) if row.transpose else axes)
            part = Part(weight.shape, order, tuple(corner), tuple(box), first, end - first)
            yield RowPart(number, part, start, (low, high, length, inner))
