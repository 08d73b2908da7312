"""Whole numbers at the ends of their types, in programs drawn at random: what the host folds, what
XLA folds and what devices compute must be one arithmetic, that of Python's numbers cut to size.
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
from tests.popxl.integers import INTEGERS, extremes, quotient
from tests.popxl.programs import run
from tests.slow import slow

SEEDS = [0, 1, *(slow(i) for i in range(2, 400))]
ENTRIES = 3
COUNT = 40  # statements


@dataclass(frozen=True)
class Pair:
    """A number in the program, and in NumPy."""

    here: popxl.Tensor
    there: int


def _cut(value: int, dtype: popxl.dtype) -> int:
    info = np.iinfo(dtype.as_numpy())
    return (value - info.min) % 2**info.bits + info.min


BINARY: dict[str, tuple[Callable[..., Any], Callable[[int, int], int]]] = {
    "add": (ops.add, lambda x, y: x + y),
    "sub": (ops.sub, lambda x, y: x - y),
    "mul": (ops.mul, lambda x, y: x * y),
    "div": (ops.div, lambda x, y: quotient(x, y) if y else -1),
    "fmod": (ops.fmod, lambda x, y: x - y * quotient(x, y) if y else x),
    "maximum": (ops.maximum, max),
}
UNARY: dict[str, tuple[Callable[..., Any], Callable[[int], int]]] = {
    "negate": (ops.negate, lambda x: -x),
    "abs": (ops.abs, abs),
    "identity": (ops.identity, lambda x: x),
}


class Writer:
    """Writes statements on numbers of all types, and does the same in Python."""

    def __init__(self, draw: random.Random, given: list[Pair]) -> None:
        self.draw, self.numbers = draw, given
        self.buffer: popxl.RemoteBuffer | None = None
        self.entries = [0] * ENTRIES

    def pick(self, dtype: popxl.dtype | None = None) -> Pair:
        fitting = [p for p in self.numbers if dtype in (None, p.here.dtype)]
        return self.draw.choice(fitting)

    def write(self) -> None:
        kinds = [self.binary, self.binary, self.binary, self.unary, self.cast, self.loop]
        if self.buffer is not None:
            kinds += [self.store, self.load]
        self.draw.choice(kinds)()

    def note(self, here: popxl.Tensor, there: int) -> None:
        self.numbers.append(Pair(here, _cut(there, here.dtype)))

    def binary(self) -> None:
        a = self.pick()
        b = self.pick(a.here.dtype)
        op, meaning = BINARY[self.draw.choice(list(BINARY))]
        self.note(op(a.here, b.here), meaning(a.there, b.there))

    def unary(self) -> None:
        a = self.pick()
        op, meaning = UNARY[self.draw.choice(list(UNARY))]
        self.note(op(a.here), meaning(a.there))

    def cast(self) -> None:
        a = self.pick()
        self.note(ops.cast(a.here, self.draw.choice(INTEGERS)), a.there)

    def loop(self) -> None:
        """total = total * factor + step, some times."""
        total = self.pick()
        factor, step = self.pick(total.here.dtype), self.pick(total.here.dtype)
        count, value = self.draw.choice([0, 1, 5]), total.there
        graph = popxl.gir().create_graph(
            lambda t, f, s: t * f + s, total.here, factor.here, step.here
        )
        (here,) = ops.repeat(graph, count, total.here, factor.here, step.here)
        for _ in range(count):
            value = value * factor.there + step.there
        self.note(here, value)

    # ---- entries, whose offsets are computed ----------------------------------------------------
    def _offset(self) -> tuple[popxl.Tensor, int]:
        a = self.pick(popxl.int32)
        three = popxl.constant(ENTRIES, popxl.int32)
        at = a.there - ENTRIES * quotient(a.there, ENTRIES)
        return ops.fmod(ops.fmod(a.here, three) + three, three), at % ENTRIES

    def store(self) -> None:
        assert self.buffer is not None
        (at, place), value = self._offset(), self.pick(popxl.int32)
        ops.remote_store(self.buffer, at, ops.reshape(value.here, (1,)))
        self.entries[place] = value.there

    def load(self) -> None:
        assert self.buffer is not None
        at, place = self._offset()
        loaded = ops.reshape(ops.remote_load(self.buffer, at), ())
        self.note(loaded, self.entries[place])


@pytest.mark.parametrize("seed", SEEDS)
def test_random_arithmetic_is_python_s(seed):
    draw = random.Random(seed)
    data = [np.array(draw.choice(extremes(d)), d.as_numpy()) for d in INTEGERS]
    expected: list[list[int]] = []

    def build(*given: popxl.Tensor) -> list[popxl.Tensor]:
        numbers = [Pair(t, int(x)) for t, x in zip(given, data, strict=True)]
        for dtype in INTEGERS:
            for value in draw.sample(extremes(dtype), 6):
                numbers.append(Pair(popxl.constant(value, dtype), value))
        writer = Writer(draw, numbers)
        if draw.random() < 0.8:
            writer.buffer = popxl.remote_buffer((1,), popxl.int32, ENTRIES)
        for _ in range(COUNT):
            writer.write()
        if writer.buffer is not None:
            for i, value in enumerate(writer.entries):
                writer.note(ops.reshape(ops.remote_load(writer.buffer, i), ()), value)
        made: list[popxl.Tensor] = []
        for dtype in INTEGERS:  # one result for each type: streams take long to compile
            same = [p for p in writer.numbers if p.here.dtype == dtype]
            expected.append([p.there for p in same])
            made.append(ops.concat([ops.reshape(p.here, (1,)) for p in same]))
        return made

    found = run(build, *data)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tolist() == theirs
