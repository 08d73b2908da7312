"""Pooling, with torch's as the reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from popxl import ops
from tests.popxl.ops.harness import OpRecord, rand

X = rand(2, 3, 7, 6)
SERIES = rand(2, 3, 9)


def _average(x, kernel, stride, padding=0, ceil=False):
    return F.avg_pool2d(x, kernel, stride, padding, ceil, count_include_pad=False)


def _same_upper(x):
    """Windows of 2, stride 2, on 7 rows: one more row at the end, that does not count."""
    sums = F.avg_pool2d(F.pad(x, (0, 0, 0, 1)), 2, 2) * 4
    counts = F.avg_pool2d(F.pad(torch.ones_like(x), (0, 0, 0, 1)), 2, 2) * 4
    return sums / counts


def _pool(name, build, reference, x=X, dtypes=("float32",), **kwargs):
    return OpRecord(name, build, [x], reference, dtypes, **kwargs)


RECORDS = [
    _pool("average_pool", lambda x: ops.average_pool(x, (2, 3)),
          lambda x: _average(x, (2, 3), 1), dtypes=("float32", "float16")),
    _pool("average_pool_stride", lambda x: ops.average_pool(x, (3, 3), (2, 2), (1, 1, 1, 1)),
          lambda x: _average(x, 3, 2, 1)),
    _pool("average_pool_ceil",
          lambda x: ops.average_pool(x, (2, 2), (2, 2), (1, 1, 1, 1), ceil_mode=True),
          lambda x: _average(x, 2, 2, 1, True)),
    _pool("average_pool_same", lambda x: ops.average_pool(x, (2, 2), (2, 2), auto_pad="same_upper"),
          _same_upper),
    _pool("average_pool_whole", lambda x: ops.average_pool(x, kernel_size=x.shape[2:]),
          lambda x: x.mean((2, 3), True)),
    _pool("max_pool", lambda x: ops.max_pool(x, (2, 3)), lambda x: F.max_pool2d(x, (2, 3), 1),
          dtypes=("float32", "float16")),
    _pool("max_pool_stride", lambda x: ops.max_pool(x, (3, 3), (2, 2), (1, 1, 1, 1)),
          lambda x: F.max_pool2d(x, 3, 2, 1)),
    _pool("max_pool_ceil", lambda x: ops.max_pool(x, (3, 3), (3, 3), ceil_mode=True),
          lambda x: F.max_pool2d(x, 3, 3, ceil_mode=True)),
    _pool("max_pool_dilation", lambda x: ops.max_pool(x, (2, 2), dilation=(2, 1)),
          lambda x: F.max_pool2d(x, 2, 1, 0, (2, 1)), grad=False,
          why="XLA has no gradient of a dilated maximum"),
    _pool("max_pool_1d", lambda x: ops.max_pool(x, (3,), (2,)), lambda x: F.max_pool1d(x, 3, 2),
          SERIES),
]  # fmt: skip
