"""Grouped products: rows that are not finite or in no group, numbers out of range, and misuse.
Ordinary values: records/linalg.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import SpecError
from popxl.transforms import autodiff
from popxl_addons.ops.routing import repeat_by_group, sort_by_expert
from tests.popxl.ops.harness import compile_quickly, evaluate
from tests.slow import slow

IN, OUT = 3, 2


def _with_gradients(build: Any, x: popxl.Tensor, m: popxl.Tensor, *rest: popxl.Tensor) -> Any:
    """The result, and the gradients of the first two inputs; the last one is the result's."""
    *others, dy = rest
    graph = popxl.gir().create_graph(build, x, m, *others)
    gradient = autodiff(graph, grads_required=graph.inputs[:2])
    call = ops.call_with_info(graph, x, m, *others)
    return (
        call.outputs[0],
        *ops.call(gradient.graph, dy, inputs_dict=gradient.inputs_dict(call)),
    )


def _rows_of(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows of an array, zeros where it has none."""
    there = (rows >= 0) & (rows < len(x))
    return np.where(there[:, None], x[np.where(there, rows, 0)], 0)


def _added(y: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """Rows added up, those left out that the result does not have."""
    out = np.zeros((count, y.shape[1]))
    for row, at in zip(y, rows, strict=True):
        if 0 <= at < count:
            out[at] += row
    return out


@np.errstate(invalid="ignore")
def _expected(x, m, sizes, rows, dy, into) -> tuple[np.ndarray, ...]:
    """By loops over groups: the result and the gradients of x and the matrices."""
    picked = x if into is not None else _rows_of(x, rows)
    d_picked = dy if into is None else _rows_of(dy, rows)
    y, dx, dm = np.zeros((len(picked), OUT)), np.zeros((len(picked), IN)), np.zeros(m.shape)
    end = 0
    for group, size in enumerate(np.clip(sizes.astype(np.int64), 0, None)):
        own = slice(end, min(end + size, len(picked)))
        y[own], dx[own] = picked[own] @ m[group], d_picked[own] @ m[group].T
        dm[group] = picked[own].T @ d_picked[own]
        end = own.stop
    if into is None:
        return y, _added(dx, rows, len(x)), dm
    return _added(y, rows, into), dx, dm


def _numbers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Small integers, whose products are exact; a few rows are not finite."""
    x = rng.integers(-3, 4, shape).astype(np.float32)
    x[rng.integers(0, shape[0], 2)] = rng.choice([np.inf, -np.inf, np.nan], (2, 1))
    return x


@pytest.mark.parametrize("seed", [0, *(slow(n) for n in range(1, 10))])
@pytest.mark.parametrize("adds", [False, True])
def test_rows_that_are_not_finite_or_in_no_group_change_no_others(seed: int, adds: bool) -> None:
    """Nor do sizes and row numbers out of range, forwards and backwards."""
    compile_quickly()
    rng = np.random.default_rng(seed)
    groups, count = int(rng.integers(1, 5)), int(rng.choice([5, 40, 150]))
    into = 7 if adds else None
    sizes = rng.integers(-2, count // groups + 2, groups).astype(np.int32)
    if seed % 2:
        sizes[-1] = 2**31 - 1  # more rows than there are
    many = into or 6
    rows = rng.integers(-2, many + 2, count).astype(np.int32)
    rows[0] = rng.choice([-(2**31), 2**31 - 1])
    x = _numbers(rng, (count if adds else many, IN))
    dy = _numbers(rng, (many if adds else count, OUT))
    m = rng.integers(-3, 4, (groups, IN, OUT)).astype(np.float32)

    def build(x, m, sizes, rows):
        return ops.grouped_matmul(x, m, sizes, rows=rows, num_out_rows=into)

    found = evaluate(partial(_with_gradients, build), x, m, sizes, rows, dy)
    for ours, expected in zip(found, _expected(x, m, sizes, rows, dy, into), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_an_infinite_row_of_no_group_leaves_the_vectors_of_groups_alone() -> None:
    def build(vectors, _, sizes):
        return repeat_by_group(vectors, sizes, rows=4)

    dy = np.ones((4, OUT), np.float32)
    dy[3] = np.inf, np.nan
    vectors, sizes = np.ones((3, OUT), np.float32), np.array([2, -3, 1], np.int32)
    y, dv, _ = evaluate(partial(_with_gradients, build), vectors, vectors, sizes, dy)
    np.testing.assert_array_equal(y, [[1, 1], [1, 1], [1, 1], [0, 0]])
    np.testing.assert_array_equal(dv, [[2, 2], [0, 0], [1, 1]])


def test_choices_that_are_no_expert_are_in_no_group() -> None:
    chosen = np.array([[-1, 0], [1, 7], [0, -(2**31)], [2**31 - 1, 1]], np.int32)
    order, places, sizes = evaluate(partial(sort_by_expert, experts=2), chosen)
    np.testing.assert_array_equal(sizes, [2, 2])
    np.testing.assert_array_equal(order, [1, 4, 2, 7, 0, 3, 5, 6])
    np.testing.assert_array_equal(order[places.ravel()], np.arange(8))


F, N = popxl.float32, popxl.int32
X, M, SIZES, ROWS = ((3, 4), F), ((2, 4, 5), F), ((2,), N), ((3,), N)
WRONG: list[tuple[str, list[Any], dict[str, Any], str]] = [
    ("two dtypes", [((3, 4), popxl.float16), M, SIZES], {}, "one dtype, not float16, float32"),
    ("integers", [((3, 4), N), ((2, 4, 5), N), SIZES], {}, "floating-point"),
    *(
        (f"{dtype.name} sizes", [X, M, ((2,), dtype)], {}, f"sizes are int32, not {dtype.name}")
        for dtype in (F, popxl.uint32, popxl.int8, popxl.bool)
    ),
    ("no groups", [X, ((0, 4, 5), F), ((0,), N)], {}, "at least one group"),
    ("no joined groups", [X, ((0, 5), F), ((0,), N)], {}, "the shapes are"),
    ("other sizes", [X, M, ((3,), N)], {}, "the shapes are"),
    ("features", [X, ((2, 3, 5), F), SIZES], {}, "rows of 4 elements"),
    ("unsigned rows", [X, M, SIZES, ((3,), popxl.uint32)], {}, "rows are int32, not uint32"),
    ("float rows", [X, M, SIZES, ((3,), F)], {}, "rows are int32, not float32"),
    ("rows of rank 2", [X, M, SIZES, ((3, 1), N)], {}, "`rows` has a number for each row"),
    (
        "other rows",
        [X, M, SIZES, ((2,), N)],
        {"num_out_rows": 4},
        "`rows` has a number for each row",
    ),
    ("into nothing", [X, M, SIZES], {"num_out_rows": 4}, "there are none"),
    (
        "negative",
        [X, M, SIZES, ROWS],
        {"num_out_rows": -1},
        "num_out_rows must be at least 0, not -1",
    ),
    (
        "fraction",
        [X, M, SIZES, ROWS],
        {"expected_rows": 2.5},
        "expected_rows must be an integer, not 2.5",
    ),
]


@pytest.mark.parametrize(("specs", "settings", "message"), [w[1:] for w in WRONG],
                         ids=[w[0] for w in WRONG])  # fmt: skip
def test_inputs_that_do_not_fit_are_refused(specs, settings, message) -> None:
    def build(x, m, sizes, *rows):
        return ops.grouped_matmul(x, m, sizes, rows=rows[0] if rows else None, **settings)

    with pytest.raises((SpecError, TypeError, ValueError), match=f"^grouped_matmul.*{message}"):
        popxl.Ir().create_graph(build, *(popxl.TensorSpec(s, dtype) for s, dtype in specs))


@pytest.mark.parametrize(("dtype", "shape"), [(F, (3, 2)), (popxl.uint32, (3, 2)), (N, (6,))])
def test_choices_are_int32_for_each_token(dtype, shape) -> None:
    spec = popxl.TensorSpec(shape, dtype)
    with pytest.raises(SpecError, match="sort_by_expert.*the experts of tokens are int32"):
        popxl.Ir().create_graph(lambda c: sort_by_expert(c, experts=2), spec)
