"""Which elements of which weights a part of a variable holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from checkpoints.tensor_shards import Part

if TYPE_CHECKING:
    from modelling.weights.row import WeightRow


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
        begin = self.part.start - first * (high - low) * inner
        return chosen[begin : begin + self.part.size]


def parts_in_row(
    row: WeightRow, shape: tuple[int, ...], group: int, start: int, size: int
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
    axis, count, first_weight = row.axis or 0, len(row.weights), 0
    length, inner = shape[axis], math.prod(shape[axis + 1 :])
    if row.shared_out:
        own = row.weights[0].shape[-1 - axis if row.transpose else axis]
        count = length // own
        first_weight, group = group * count, 0
    for number in range(first_weight, first_weight + count):
        weight = row.weights[number]
        box = list(reversed(weight.shape) if row.transpose else weight.shape)
        corner = [0] * len(box)
        corner[axis] = group * (length // count)
        box[axis] = max(min(length // count, box[axis] - corner[axis]), 0)  # without the padding
        low = (number - first_weight) * (length // count)
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
