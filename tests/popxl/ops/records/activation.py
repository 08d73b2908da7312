"""Activation functions."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from popxl import ops
from tests.popxl.ops.harness import OpRecord, rand

A = rand(3, 5, low=-4.0, high=4.0)
ZERO = np.array([-1.0, 0.0, 1.0])
LARGE = np.array([[-300.0, 0.0, 200.0], [80.0, 81.0, 82.0]])
ALL = ("float32", "float16", "bfloat16")


def _in_place(op):
    def build(t):
        copy = ops.identity(t)
        return op(copy), copy

    return build


def _twice(fn):
    return lambda t: (fn(t), fn(t))


def _gelu_tanh(t):
    return F.gelu(t, approximate="tanh")


RECORDS = [
    OpRecord("relu", ops.relu, [A], torch.relu, ALL),
    OpRecord("relu_at_0", ops.relu, [ZERO], torch.relu),
    OpRecord("relu_", _in_place(ops.relu_), [A], _twice(torch.relu)),
    OpRecord("gelu", ops.gelu, [A], _gelu_tanh, ALL),
    OpRecord("gelu_large", ops.gelu, [LARGE], _gelu_tanh),
    OpRecord("gelu_", _in_place(ops.gelu_), [A], _twice(_gelu_tanh)),
    OpRecord("geluerf", ops.geluerf, [A], F.gelu),
    OpRecord("geluerf_", _in_place(ops.geluerf_), [A], _twice(F.gelu)),
    OpRecord("swish", ops.swish, [A], F.silu),
    OpRecord("swish_", _in_place(ops.swish_), [A], _twice(F.silu)),
    OpRecord("tanh", ops.tanh, [A], torch.tanh, tolerance=2,
             why="1 - y² loses digits where y is near 1, the more so from a rounded y"),
    OpRecord("softmax", lambda t: ops.softmax(t, -1), [A], lambda t: torch.softmax(t, -1), ALL),
    OpRecord("softmax_first", lambda t: ops.softmax(t, 0), [A], lambda t: torch.softmax(t, 0)),
    OpRecord("softmax_large", lambda t: ops.softmax(t, 1), [LARGE],
             lambda t: torch.softmax(t, 1)),
]  # fmt: skip
