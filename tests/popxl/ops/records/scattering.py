"""Reducing into positions, and counting."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from popxl import ops
from tests.popxl.ops.harness import OpRecord, ints, rand

DATA, START = rand(5, 3), rand(4, 3, seed=1)
ROWS = np.array([0, 3, 3, 1, 3], np.int32)
EACH = ints(5, 3, high=4)
COUNTED = np.array([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 99.0])
PLAIN = {"dtypes": ("float32",), "more": ("float16",)}
TORCH = {"sum": "sum", "min": "amin", "max": "amax"}


def _reduce(reduction, axis=0, size=4):
    def reference(data, indices, start=None):
        shape = list(data.shape)
        shape[axis] = size
        if indices.ndim == 1:
            along = [1] * data.ndim
            along[axis] = -1
            indices = indices.reshape(along)
        base = torch.zeros(shape, dtype=data.dtype) if start is None else start
        return base.scatter_reduce(
            axis, indices.expand(data.shape), data, TORCH[reduction], include_self=start is not None
        )

    return reference


def _record(name, reduction, inputs, axis=0, size=4, dtypes=("float32", "float16"), more=()):
    return OpRecord(
        f"scatter_reduce_{name}",
        lambda *ts: ops.scatter_reduce(ts[0], ts[1], reduction, *ts[2:], axis=axis, axis_size=size),
        list(inputs),
        _reduce(reduction, axis, size),
        dtypes,
        more=more,
    )


def _dropped(data, indices):
    kept = (indices >= 0) & (indices < 4)
    return _reduce("sum")(data[kept], indices[kept])


def _overwritten(data, indices, start):
    out = start.clone()
    out[indices] = data
    return out


def _count(levels, absolute):
    def reference(t):
        values = t.abs() if absolute else t
        edges = [-np.inf, *levels, np.inf]
        return torch.tensor([int(((values >= a) & (values < b)).sum())
                             for a, b in itertools.pairwise(edges)])  # fmt: skip

    return reference


def _histogram(name, levels, absolute):
    return OpRecord(name, lambda t: ops.histogram(t, levels, absolute), [COUNTED],
                    _count(levels, absolute), grad=False, why="integer output",
                    outputs=("uint32",))  # fmt: skip


RECORDS = [
    _record("sum", "sum", [DATA, ROWS]),
    _record("sum_start", "sum", [DATA, ROWS, START]),
    _record("sum_each", "sum", [DATA, EACH], **PLAIN),
    _record("sum_axis", "sum", [DATA, np.array([1, 1, 0], np.uint32)], axis=1, size=2,
            **PLAIN),
    _record("sum_column", "sum", [DATA, ROWS[:, None]], **PLAIN),
    _record("max", "max", [DATA, ROWS]),
    _record("max_start", "max", [DATA, EACH, START], **PLAIN),
    _record("min", "min", [DATA, ROWS], size=6),
    OpRecord("scatter_reduce_none", lambda d, i, s: ops.scatter_reduce(d, i, "none", s),
             [DATA[:3], np.array([2, 0, 3], np.int32), START], _overwritten),
    OpRecord("scatter_reduce_outside",
             lambda d, i: ops.scatter_reduce(d, i, "sum", axis_size=4),
             [DATA, np.array([0, -1, 4, 3, 3], np.int32)], _dropped),
    OpRecord("grouped_scatter_reduce",
             lambda d, i: ops.grouped_scatter_reduce(d, i, "sum", axis_size=4, group_size=2),
             [rand(2, 5, 3), ints(2, 5, high=4)],
             lambda d, i: torch.stack([_reduce("sum")(x, k) for x, k in zip(d, i, strict=True)])),
    _histogram("histogram", [-1.0, 0.0, 1.0], False),
    _histogram("histogram_absolute", [0.25, 1.0], True),
]  # fmt: skip
