"""Float8. Values are chosen such that they are exact, so that torch needs no float8.

How casts round is in test_float8.py.
"""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F

import popxl
from popxl import ops
from tests.popxl.ops.harness import OpRecord, ints

A, B = (ints(*shape, low=-7, high=8).astype(np.float64) for shape in ((2, 3, 4), (4, 5)))
IMAGE, KERNEL, BACK = (ints(*shape, low=-3, high=4).astype(np.float64)
                       for shape in ((1, 2, 4, 4), (3, 2, 2, 2), (2, 3, 2, 2)))  # fmt: skip
UP, DOWN = np.array(2, np.int32), np.array([-3], np.int32)
ONLY_FORWARD = "float8 convolutions are for inference"


def _cast(t, scale, kind=popxl.float8_143):
    return ops.pow2scale_cast_to_fp8(t, scale, kind)


def _round_trip(t, scale):
    return ops.pow2scale_cast_from_fp8(_cast(t, scale), ops.negate(scale), popxl.float32)


def _product(a, b, scale):
    return ops.matmul_pow2scaled(_cast(a, scale), _cast(b, scale, popxl.float8_152), scale)


def _convolved(op, **kwargs):
    return lambda x, w, s: op(_cast(x, s), _cast(w, s), s, **kwargs)


def _ones():
    return popxl.constant([1.0, 1.0, 1.0], popxl.float32)


NO_FLOAT8 = "the gradients given are no float8 numbers: test_fp8.py"
COARSE = np.array([[1.0, -2.0], [0.5, 3.0], [-1.5, 0.0]])  # exact with 2 bits of mantissa
ROW = np.array([0.5, -1.0, 4.0])

RECORDS = [
    OpRecord("pow2scale_cast_from_fp8", _round_trip, [A, UP], lambda t, s: t,
             outputs=("float32",)),
    OpRecord("pow2scale_cast_scaled",
             lambda t, s: ops.pow2scale_cast_from_fp8(_cast(t, s), s, popxl.float16),
             [A, UP], lambda t, s: t * 16, outputs=("float16",), tolerance=100,
             why="the gradient arrives in float16"),
    OpRecord("matmul_pow2scaled", _product, [COARSE.T, COARSE, UP],
             lambda a, b, s: a @ b * 64, outputs=("float16",), tolerance=100,
             why="result and gradient are float16"),
    OpRecord("matmul_pow2scaled_batch",
             lambda a, b, s: ops.matmul_pow2scaled(_cast(a, s), _cast(b, s), s), [A, B, DOWN],
             lambda a, b, s: a @ b / 512, outputs=("float16",), tolerance=100,
             why="result and gradient are float16"),
    OpRecord("fp8_linear", lambda x, w, b: ops.fp8.linear(x, w, _ones(), bias=b, powers_of_2=True),
             [COARSE, COARSE.T, ROW], lambda x, w, b: x @ w + b,
             ("float32", "float16", "bfloat16"), False, NO_FLOAT8),
    OpRecord("fp8_linear_current",
             lambda x, w, b: ops.fp8.linear(x, w, bias=b, rule=ops.fp8.ScaleRule()),
             [COARSE, COARSE.T, ROW], lambda x, w, b: x @ w + b,
             ("float32",), False, NO_FLOAT8, more=("float16", "bfloat16")),
    OpRecord("conv_pow2scaled", _convolved(ops.conv_pow2scaled, padding=(1, 1, 1, 1)),
             [IMAGE, KERNEL, UP], lambda x, w, s: F.conv2d(x, w, padding=1) * 64,
             ("float32",), False, ONLY_FORWARD, outputs=("float16",)),
    OpRecord("conv_transpose_pow2scaled",
             _convolved(ops.conv_transpose_pow2scaled, stride=(2, 2)), [IMAGE, BACK, UP],
             lambda x, w, s: F.conv_transpose2d(x, w, stride=2) * 64,
             ("float32",), False, ONLY_FORWARD, outputs=("float16",)),
]  # fmt: skip
