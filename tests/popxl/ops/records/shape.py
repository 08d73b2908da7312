"""Moving elements, out of place and as views."""

from __future__ import annotations

import torch

from popxl import ops
from tests.popxl.ops.harness import OpRecord, ints, rand

A = rand(2, 3, 4)
ALL = ("float32", "float16", "bfloat16")


def _record(name, build, reference, inputs=(A,), dtypes=("float32",), **kwargs):
    more = ("float16",) if dtypes == ("float32",) else ()  # moved as float32 is
    return OpRecord(name, build, list(inputs), reference, dtypes, more=more, **kwargs)


def _partial_split(t):
    """Only the middle part is used: the others' gradients are zeros."""
    return ops.split(t, [1, 2, 1], -1)[1]


RECORDS = [
    _record("reshape", lambda t: ops.reshape(t, (4, -1)), lambda t: t.reshape(4, 6), dtypes=ALL),
    _record("reshape_", lambda t: ops.reshape_(t, (24,)), lambda t: t.reshape(24)),
    _record("flatten", ops.flatten, torch.flatten),
    _record("flatten_", ops.flatten_, torch.flatten),
    _record("squeeze", ops.squeeze, torch.squeeze, [rand(1, 3, 1)]),
    _record("squeeze_axes", lambda t: ops.squeeze(t, [-1]), lambda t: t.squeeze(-1),
            [rand(1, 3, 1)]),
    _record("transpose", ops.transpose, lambda t: t.permute(2, 1, 0), dtypes=ALL[:2]),
    _record("transpose_axes", lambda t: ops.transpose(t, (1, -1, 0)),
            lambda t: t.permute(1, 2, 0)),
    _record("transpose_", lambda t: ops.transpose_(t, (2, 0, 1)), lambda t: t.permute(2, 0, 1)),
    _record("transpose_T", lambda t: t.T, lambda t: t.permute(2, 1, 0)),
    _record("concat", lambda a, b: ops.concat([a, b], 1), lambda a, b: torch.cat([a, b], 1),
            [A, rand(2, 1, 4)], dtypes=ALL[:2]),
    _record("concat_int", lambda a, b: ops.concat([a, b], -1),
            lambda a, b: torch.cat([a, b], -1), [ints(2, 3, high=9), ints(2, 1, high=9)],
            dtypes=("float32",), grad=False, why="integers", outputs=("int32",)),
    _record("concat_", lambda a, b: ops.concat_([a, b], 0), lambda a, b: torch.cat([a, b]),
            [A, rand(1, 3, 4)]),
    _record("split", lambda t: ops.split(t, 2, -1), lambda t: torch.split(t, 2, -1),
            dtypes=ALL[:2]),
    _record("split_sizes", lambda t: ops.split(t, [1, 2], 1), lambda t: torch.split(t, [1, 2], 1)),
    _record("split_partly_used", _partial_split, lambda t: t[..., 1:3]),
    _record("slice", lambda t: ops.slice(t, [0, 1], [1, 3]), lambda t: t[0:1, 1:3], dtypes=ALL[:2]),
    _record("slice_one_axis", lambda t: ops.slice(t, 1, None, 2, -1), lambda t: t[..., 1::2]),
    _record("slice_negative", lambda t: ops.slice(t, None, None, [-1, -2], [1, 2]),
            lambda t: t.flip(1).flip(2)[..., ::2]),
    _record("slice_negative_bounds", lambda t: ops.slice(t, [-3, 3], [-1, 0], [1, -2], [1, 2]),
            lambda t: t[:, 0:2, [3, 1]]),
    _record("slice_beyond", lambda t: ops.slice(t, 1, 99, axis=2), lambda t: t[..., 1:]),
    _record("slice_", lambda t: ops.slice_(t, 1, 3, axis=2), lambda t: t[..., 1:3]),
    _record("getitem", lambda t: t[1, ..., 1:], lambda t: t[1, ..., 1:]),
    _record("subsample", lambda t: ops.subsample(t, 2), lambda t: t[::2]),
    _record("subsample_first", lambda t: ops.subsample(t, [1, 2]), lambda t: t[:, ::2]),
    _record("subsample_list", lambda t: ops.subsample(t, [1, 2, 3]), lambda t: t[:, ::2, ::3]),
]  # fmt: skip
