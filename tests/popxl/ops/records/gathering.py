"""Picking and placing elements by index tensors."""

from __future__ import annotations

import numpy as np
import torch

import popxl
from popxl import ops
from tests.popxl.ops.harness import OpRecord, ints, rand

TABLE, CUBE = rand(6, 4), rand(2, 5, 3)
ROWS = ints(2, 3, high=6)
OUTSIDE = np.array([0, -1, 5, 6, 2, 2], np.int32)
UNSIGNED = np.array([0, 2**32 - 1, 5, 6, 2, 2], np.uint32)
HALVES = ("float32", "float16", "bfloat16")


def _zero_outside(t, i):
    valid = (i >= 0) & (i < t.shape[0])
    return torch.where(valid[:, None], t[i.clamp(0, t.shape[0] - 1)], 0.0)


def _clamped(t, i):
    return t[i.clamp(0, t.shape[0] - 1)]


def _per_group(t, i):
    return torch.stack([x[:, k] for x, k in zip(t, i, strict=True)])


def _onehot(t):
    classes = popxl.constant(np.array(4), popxl.int32)
    values = popxl.constant([-1.0, 2.0], popxl.float32)
    return ops.onehot(t, classes, values, 1)


def _onehot_values(t, values):
    return ops.onehot(t, popxl.constant([4], popxl.int32), values, -1)


def _onehot_reference(t, values):
    return torch.nn.functional.one_hot(t, 4) * (values[1] - values[0]) + values[0]


def _topk(largest):
    return lambda t: torch.topk(t, 3, -1, largest)


def _dynamic_update(t, i, x):
    copy = ops.identity(t)
    return ops.dynamic_update_(copy, i, x, [1, 2], [2, 3], True), copy


def _update_reference(t, i, x):
    out = t.clone()
    out[:, i[0] : i[0] + 2, i[1] : i[1] + 3] = x
    return out


START = np.array([3, 0], np.uint32)
# Elements that move in half types as others do.
MOVED = {"dtypes": ("float32",), "more": ("float16",)}

RECORDS = [
    OpRecord("gather", ops.gather, [TABLE, ROWS], lambda t, i: t[i], HALVES),
    OpRecord("gather_axis", lambda t, i: ops.gather(t, i, -1), [CUBE, ints(4, high=3)],
             lambda t, i: t[..., i]),
    OpRecord("gather_middle", lambda t, i: ops.gather(t, i, 1, 0.2), [CUBE, ints(2, 2, high=5)],
             lambda t, i: t[:, i], **MOVED),
    OpRecord("gather_scalar", ops.gather, [TABLE, np.array(2, np.uint32)], lambda t, i: t[i],
             **MOVED),
    OpRecord("gather_clamps", ops.gather, [TABLE, OUTSIDE], _clamped, **MOVED),
    OpRecord("gather_clamps_unsigned", ops.gather, [TABLE, UNSIGNED], _clamped, **MOVED),
    OpRecord("gather_zeros", lambda t, i: ops.gather(t, i, zero_OOR=True), [TABLE, OUTSIDE],
             _zero_outside),
    OpRecord("gather_zeros_unsigned", lambda t, i: ops.gather(t, i, zero_OOR=True),
             [TABLE, UNSIGNED], _zero_outside, **MOVED),
    OpRecord("gather_same_row", ops.gather, [TABLE, np.full(3000, 2, np.int32)],
             lambda t, i: t[i], tolerance=3, why="3000 float32 additions"),
    OpRecord("tied_gather", ops.tied_gather, [TABLE, ROWS], lambda t, i: t[i]),
    OpRecord("groupedgather", lambda t, i: ops.groupedgather(t, i, 1, 2),
             [CUBE, ints(2, 4, high=3)], _per_group),
    OpRecord("groupedgather_one", ops.groupedgather, [TABLE, ROWS], lambda t, i: t[i], **MOVED),
    OpRecord("scatter", lambda t, i, v: ops.scatter(t, i, v, 1),
             [TABLE, np.array([[3, 0], [1, 2]], np.int32), rand(2, 2)],
             lambda t, i, v: t.scatter(1, i, v)),
    OpRecord("scatter_first", ops.scatter, [TABLE, np.array([[5, 0, 1]], np.int32), rand(1, 3)],
             lambda t, i, v: t.scatter(0, i, v), **MOVED),
    OpRecord("onehot", _onehot, [np.array([0, 3, 9], np.int32)],
             lambda t: torch.nn.functional.one_hot(t, 10)[:, :4].double() * 3 - 1, ("float32",),
             False, "no float input"),
    OpRecord("onehot_values", _onehot_values, [ints(2, 3, high=4), rand(2)], _onehot_reference),
    OpRecord("topk", lambda t: ops.topk(t, 3, -1, True, True), [CUBE], _topk(True),
             outputs=("float32", "int32"), dtypes=("float32",)),
    OpRecord("topk_smallest", lambda t: ops.topk(t, 3, 2, False, True), [CUBE], _topk(False),
             outputs=("float16", "int32"), dtypes=("float16",)),
    OpRecord("topk_first_axis", lambda t: ops.topk(t, 2, 0, False, True)[0], [TABLE],
             lambda t: torch.topk(t, 2, 0, False).values),
    OpRecord("topk_int_smallest", lambda t: ops.topk(t, 2, 0, False, True),
             [np.array([3, 0, 2**32 - 1], np.uint32)], lambda t: torch.topk(t, 2, 0, False),
             ("float32",), False, "integers", outputs=("uint32", "int32")),
    OpRecord("dynamic_slice", lambda t, i: ops.dynamic_slice(t, i, [1, 2], [2, 3], True),
             [CUBE, START], lambda t, i: t[:, i[0] : i[0] + 2, i[1] : i[1] + 3]),
    OpRecord("dynamic_slice_one", lambda t, i: ops.dynamic_slice(t, i, [-1], [1], False),
             [CUBE, np.array(2, np.int32)], lambda t, i: t[..., 2:], **MOVED),
    OpRecord("dynamic_update",
             lambda t, i, x: ops.dynamic_update(t, i, x, [1, 2], [2, 3], True),
             [CUBE, START, rand(2, 2, 3)], _update_reference),
    OpRecord("dynamic_update_", _dynamic_update, [CUBE, START, rand(2, 2, 3)],
             lambda t, i, x: (_update_reference(t, i, x), _update_reference(t, i, x))),
]  # fmt: skip
