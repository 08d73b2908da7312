"""Matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import popxl
from popxl import ops
from tests.popxl.ops.harness import OpRecord, ints, rand

HALF = ("float16", "bfloat16")
ALL = ("float32", *HALF)


def _matmul(name, a, b, dtypes=("float32", "float16")):
    return OpRecord(f"matmul{name}", ops.matmul, [a, b], torch.matmul, dtypes)


def _grouped(sizes: list[int]) -> Callable[..., torch.Tensor]:
    """Each group's rows by its matrix; zeros after the last group."""

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ends = np.cumsum(sizes)
        parts = [x[e - n : e] @ m for n, e, m in zip(sizes, ends, w, strict=True)]
        return torch.cat([*parts, 0 * x[ends[-1] :] @ w[0]])

    return product


def _record(name: str, build: Any, inputs: list[np.ndarray], reference: Any) -> OpRecord:
    """In half types where few loops over tiles are compiled; of slow tests, in all."""
    half = {"": HALF[:1], "_added": HALF[1:]}.get(name, ())
    more = () if name.endswith("tiles") else tuple(t for t in HALF if t not in half)
    dtypes = ("float32", *half)
    if name in ("_tiles", "_joined"):  # also in "_picked_tiles" and "_joined_transpose_tiles"
        dtypes, more = (), ("float32", *more)
    return OpRecord(f"grouped_matmul{name}", build, inputs, reference, dtypes,
                    tolerance=4, why="sums of hundreds of rows", more=more)  # fmt: skip


def _grouped_case(
    name: str, sizes: list[int], rows: int, transpose: bool = False, joined: bool = False
) -> OpRecord:
    shape = (len(sizes), 6, 5) if transpose else (len(sizes), 5, 6)
    given = (-1, shape[-1]) if joined else shape
    expected = _grouped(sizes)

    def build(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
        return ops.grouped_matmul(x, w, popxl.constant(np.array(sizes, np.int32)), transpose)

    def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w = w.reshape(shape)
        return expected(x, w.transpose(1, 2) if transpose else w)

    inputs = [rand(rows, 5), rand(*shape).reshape(given)]
    return _record(name, build, inputs, reference)


def _picked_case(name: str, sizes: list[int], rows: list[int], transpose: bool) -> OpRecord:
    """Rows of x in any order, more than once or never."""
    where, shape = np.array(rows, np.int32), (len(sizes), 6, 5) if transpose else (len(sizes), 5, 6)

    def build(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
        groups, picked = (popxl.constant(np.array(a, np.int32)) for a in (sizes, where))
        return ops.grouped_matmul(x, w, groups, transpose, rows=picked)

    def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return _grouped(sizes)(x[where], w.transpose(1, 2) if transpose else w)

    return _record(f"_picked{name}", build, [rand(max(rows) + 2, 5), rand(*shape)], reference)


def _added_case(name: str, sizes: list[int], rows: list[int], transpose: bool) -> OpRecord:
    """Rows of the result that many products are added to, or none."""
    where, shape = np.array(rows, np.int32), (len(sizes), 6, 5) if transpose else (len(sizes), 5, 6)
    count = max(rows) + 2

    def build(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
        groups, target = (popxl.constant(np.array(a, np.int32)) for a in (sizes, where))
        return ops.grouped_matmul(x, w, groups, transpose, rows=target, num_out_rows=count)

    def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = _grouped(sizes)(x, w.transpose(1, 2) if transpose else w)
        return torch.zeros(count, 6, dtype=y.dtype).index_add(0, torch.tensor(rows), y)

    return _record(f"_added{name}", build, [rand(len(rows), 5), rand(*shape)], reference)


MANY_ROWS = [int(i) for i in np.random.default_rng(0).integers(0, 90, 455)]

RECORDS = [
    _grouped_case("", [3, 0, 4, 1], 8),
    _grouped_case("_tiles", [130, 0, 33, 1, 291, 0], 455),
    _grouped_case("_rest", [2, 0, 35], 60, transpose=True),
    _grouped_case("_joined", [3, 2, 70], 75, joined=True),
    _grouped_case("_joined_transpose_tiles", [300, 0, 20], 320, transpose=True, joined=True),
    _grouped_case("_none", [0, 0], 3),
    _picked_case("", [3, 0, 4, 1], [0, 2, 2, 5, 1, 0, 3, 4], transpose=False),
    _picked_case("_tiles", [130, 0, 33, 1, 285, 0], MANY_ROWS, transpose=True),
    _added_case("", [3, 0, 4, 1], [0, 2, 4, 5, 1, 0, 3, 2], transpose=True),
    _added_case("_tiles", [130, 0, 33, 1, 285, 0], MANY_ROWS, transpose=False),
    _matmul("", rand(3, 4), rand(4, 5), ALL),
    _matmul("_batch", rand(2, 3, 4), rand(2, 4, 5)),
    _matmul("_batch_matrix", rand(2, 6, 3, 4), rand(4, 5)),
    _matmul("_matrix_batch", rand(3, 4), rand(2, 4, 5)),
    _matmul("_broadcast", rand(2, 1, 3, 4), rand(6, 4, 5)),
    _matmul("_row", rand(4), rand(4, 5)),
    _matmul("_column", rand(2, 3, 4), rand(4, seed=1)),
    _matmul("_dot", rand(4), rand(4, seed=1)),
    _matmul("_row_batch", rand(4), rand(2, 4, 5)),
    OpRecord("matmul_operator", lambda a, b: a @ b, [rand(3, 4), rand(4, 5)], torch.matmul),
    OpRecord("matmul_square", lambda a: ops.matmul(a, a), [rand(4, 4)], lambda a: a @ a),
    OpRecord("matmul_output_type", lambda a, b: ops.matmul(a, b, 0.3, popxl.float32,
             popxl.float32), [rand(3, 4), rand(4, 5)], torch.matmul, outputs=("float32",)),
    OpRecord("matmul_int", ops.matmul, [ints(3, 4, high=9), ints(4, 5, high=9)], torch.matmul,
             ("float32",), False, "integers", outputs=("int32",)),
]  # fmt: skip
