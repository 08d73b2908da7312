"""Matrix products."""

from __future__ import annotations

import torch

import popxl
from popxl import ops
from tests.popxl.ops.harness import OpRecord, ints, rand

ALL = ("float32", "float16", "bfloat16")


def _matmul(name, a, b, dtypes=("float32", "float16")):
    return OpRecord(f"matmul{name}", ops.matmul, [a, b], torch.matmul, dtypes)


RECORDS = [
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
