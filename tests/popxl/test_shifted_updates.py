"""Updates of a tensor with parts of itself, between reshapes, drawn at random, against numpy.

XLA's CPU compiler updates in place, and must not overwrite what it still has to read
(openxla/xla#49176, and `test_xla_faults.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from tests.popxl.programs import graph_of, run
from tests.slow import slow

SHAPES = [(24,), (24, 1, 1), (1, 24), (6, 4), (4, 6), (2, 3, 4), (1, 4, 6, 1), (3, 1, 8)]
DTYPES = [np.dtype(np.int32), np.dtype(np.float32), popxl.bfloat16.as_numpy()]
CHAINS = 6  # in a program


@dataclass
class Part:
    """A slice of an axis: `count` elements, `step` apart, from `start`."""

    axis: int
    start: int
    step: int
    count: int
    is_reversed: bool

    @property
    def bounds(self) -> tuple[int, int | None, int]:
        """Start, stop and step of a slice."""
        last = self.start + (self.count - 1) * self.step
        if not self.is_reversed:
            return self.start, last + 1, self.step
        return last, self.start - 1 if self.start else None, -self.step

    def of(self, x: np.ndarray) -> np.ndarray:
        return x[(slice(None),) * self.axis + (slice(*self.bounds),)]


def _part(draw: random.Random, axis: int, size: int, count: int, strided: bool) -> Part:
    step = 2 if strided and (count - 1) * 2 < size else 1
    start = draw.randrange(size - (count - 1) * step)
    return Part(axis, start, step, count, draw.random() < 0.3)


Writer = Callable[[popxl.Tensor, Part, Part, popxl.Tensor], popxl.Tensor]


def _with_a_view(x: popxl.Tensor, to: Part, of: Part, index: popxl.Tensor) -> popxl.Tensor:
    owner = ops.identity(x)
    view = ops.slice_(owner, *to.bounds, axis=to.axis)
    ops.var_updates.copy_var_update_(view, ops.slice(owner, *of.bounds, axis=of.axis))
    return owner


def _with_a_transposed_view(x: popxl.Tensor, to: Part, of: Part, index: Any) -> popxl.Tensor:
    owner = ops.identity(x)
    order = tuple(range(x.rank))[::-1]
    view = ops.slice_(ops.transpose_(owner, order), *to.bounds, axis=x.rank - 1 - to.axis)
    part = ops.slice(owner, *of.bounds, axis=of.axis)
    ops.var_updates.copy_var_update_(view, ops.transpose(part, order))
    return owner


def _with_a_dynamic_update(x: popxl.Tensor, to: Part, of: Part, index: Any) -> popxl.Tensor:
    part = ops.slice(x, *of.bounds, axis=of.axis)
    at = index + popxl.constant([to.start], popxl.int32)
    return ops.dynamic_update(x, at, part, [to.axis], [to.count], False)


def _with_dynamic_slices(x: popxl.Tensor, to: Part, of: Part, index: Any) -> popxl.Tensor:
    """In place, with a part that is taken dynamically as well."""
    owner = ops.identity(x)
    at = [index + popxl.constant([p.start], popxl.int32) for p in (of, to)]
    part = ops.dynamic_slice(owner, at[0], [of.axis], [of.count], False)
    ops.dynamic_update_(owner, at[1], part, [to.axis], [to.count], False)
    return owner


def _with_a_scatter(x: popxl.Tensor, to: Part, of: Part, index: Any) -> popxl.Tensor:
    part = ops.slice(x, *of.bounds, axis=of.axis)
    rows = np.arange(x.shape[to.axis])[slice(*to.bounds)]
    lined = rows.reshape(-1, *(1,) * (x.rank - 1 - to.axis))
    at = popxl.constant(np.broadcast_to(lined, part.shape).astype(np.int32)) + index
    return ops.scatter(x, at, part, axis=to.axis)


WRITERS: list[Writer] = [
    _with_a_view, _with_a_transposed_view, _with_a_dynamic_update, _with_dynamic_slices,
    _with_a_scatter,
]  # fmt: skip
DYNAMIC: list[Writer] = [_with_a_dynamic_update, _with_dynamic_slices]


def _updated(
    draw: random.Random, here: popxl.Tensor, there: np.ndarray, index: popxl.Tensor
) -> tuple[popxl.Tensor, np.ndarray]:
    """The tensor in another shape, with a part of it written to another."""
    shape = draw.choice(SHAPES)
    here, there = ops.reshape(here, shape), there.reshape(shape).copy()
    if draw.random() < 0.5:
        here, there = here + 1, there + there.dtype.type(1)
    axis = draw.choice([i for i, n in enumerate(shape) if n > 1])
    size, write = shape[axis], draw.choice(WRITERS)
    count = draw.randint(1, size - 1)
    is_static = write not in DYNAMIC
    to, of = (_part(draw, axis, size, count, is_static) for _ in range(2))
    if not is_static:
        to.is_reversed = False
        of.is_reversed &= write is not _with_dynamic_slices
    if draw.random() < 0.2:
        graph = graph_of(lambda x, i: (write(x, to, of, i), i), here, index)
        here = ops.repeat(graph, 2, here, index)[0]
        to.of(there)[...] = of.of(there).copy()
    else:
        here = write(here, to, of, index)
    to.of(there)[...] = of.of(there).copy()
    return here, there


def _check(seed: int) -> None:
    draw = random.Random(seed)
    x = np.arange(24).astype(draw.choice(DTYPES))
    expected = []

    def build(t: popxl.Tensor, index: popxl.Tensor) -> list[popxl.Tensor]:
        results = []
        for _ in range(CHAINS):
            here, there = t, x
            for _ in range(draw.randint(1, 3)):
                here, there = _updated(draw, here, there, index)
            shape = draw.choice(SHAPES)
            results.append(ops.reshape(here, shape))
            expected.append(there.reshape(shape))
        return results

    found = run(build, x, np.zeros(1, np.int32))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("seed", [0, 1, *(slow(i) for i in range(2, 60))])
def test_updates_with_parts_of_themselves(seed):
    _check(seed)
