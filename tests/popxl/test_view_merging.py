"""Views of views of views: merged where that is possible, else elements picked by number."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._schedule.schedule_builder import build_schedule
from tests.popxl.programs import f32, run, run_ir, store


def _step(draw: random.Random, here: Any, there: np.ndarray) -> tuple[Any, np.ndarray]:
    """A slice, forwards or backwards, or a transpose of a view; the same of NumPy's."""
    if draw.random() < 0.4:
        axes = tuple(draw.sample(range(3), 3))
        return ops.transpose_(here, axes), there.transpose(axes)
    axis = draw.randrange(3)
    size = there.shape[axis]
    first = draw.choice([0, 0, 1]) if size > 2 else 0
    step = draw.choice([1, 1, 2]) if size > 4 else 1
    if draw.random() < 0.5:
        taken = slice(first, None, step)
    else:
        taken = slice(size - 1 - first, None, -step)
    index: list[Any] = [slice(None)] * 3
    index[axis] = taken
    view = ops.slice_(here, taken.start, taken.stop, taken.step, axis)
    return view, there[tuple(index)]


@pytest.mark.parametrize("seed", range(4))
def test_slices_and_transposes_of_each_other_are_one_view(seed):
    data, draw = f32(7, 9, 6), random.Random(seed)
    there = data.copy()
    seen = there

    def build(x):
        nonlocal seen
        owner = ops.identity(x)
        view = owner
        for _ in range(40):
            view, seen = _step(draw, view, seen)
        before = ops.identity(view)
        ops.add_(view, view * 2.0)
        kinds = [node.kind for node in popxl.gcg().functional.nodes]
        assert kinds.count("view") == kinds.count("write") == 1
        return owner, view, before

    found = run(build, data)
    before = seen.copy()
    seen += seen * np.float32(2)
    for ours, theirs in zip(found, [there, seen, before], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_reshapes_of_each_other_are_one_view():
    def build(x):
        view = ops.identity(x)
        for shape in [(6, 4), (2, 12), (24,), (3, 8)]:
            view = ops.reshape_(view, shape)
        view = ops.identity(view)
        assert [node.kind for node in popxl.gcg().functional.nodes].count("view") == 1
        return view

    (found,) = run(build, f32(4, 6))
    np.testing.assert_array_equal(found, f32(4, 6).reshape(3, 8))


ROWS, COLUMNS = 2001, 5


def _write_far(count: int) -> tuple[popxl.Ir, list[Any]]:
    """A program that adds 1 to a view that no merging brings near to its owner."""
    ir = popxl.Ir()
    with ir.main_graph:
        owner = popxl.variable(np.zeros((ROWS, COLUMNS), np.float32))
        view: Any = owner
        for i in range(count):
            view = ops.transpose_(ops.slice_(view, 1, None) if i % 2 else ops.slice_(view, 0, -1))
            view = ops.reshape_(view, (view.shape[1], view.shape[0]))
        ops.add_(view, popxl.constant(1.0))
        return ir, [store(owner)]


def test_far_views_pick_what_they_show():
    there = np.zeros((ROWS, COLUMNS), np.float32)
    numbers = np.arange(there.size).reshape(there.shape)
    for i in range(6):
        numbers = (numbers[1:] if i % 2 else numbers[:-1]).T
        numbers = numbers.reshape(numbers.shape[::-1])
    there.reshape(-1)[numbers] += 1
    np.testing.assert_array_equal(run_ir(*_write_far(6))[0], there)


def test_code_has_no_numbers_of_elements():
    """Element numbers are one argument, for any number of views."""
    ir, _ = _write_far(6)
    (segment,) = build_schedule(ir).segments
    (numbers,) = segment.constants
    assert numbers._data.nbytes < 4 * ROWS * COLUMNS
    session = popxl.Session(ir)
    code = session._program.code(segment.name, "stablehlo")
    assert len(code) < 50_000
