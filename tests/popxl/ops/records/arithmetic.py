"""Functions of two and more tensors, with broadcasting."""

from __future__ import annotations

import numpy as np
import torch

from popxl import ops
from tests.popxl.ops.harness import OpRecord, ints, rand

A, B = rand(2, 3, 4), rand(2, 3, 4, seed=1)
ROW, COLUMN = rand(4, seed=2), rand(3, 1, seed=3)
POSITIVE = rand(2, 3, 4, low=0.3, high=2.0)
COUNTER = "a counter is not differentiated"
INTS = ints(5, low=-20, high=20), np.array([3, -4, 5, 7, -2], np.int32)


def _scaled_add_in_place(x, y):
    copy = ops.identity(x)
    return ops.scaled_add_(copy, y, a=0.5, b=-2.0), copy


def _add_in_place(x, y):
    copy = ops.identity(x)
    return ops.add_(copy, y), copy


def _increment_in_place(t):
    copy = ops.identity(t)
    return ops.increment_mod_(copy, 3, 5), copy


RECORDS = [
    OpRecord("add", ops.add, [A, B], torch.add, ("float32", "float16", "bfloat16")),
    OpRecord("add_row", ops.add, [A, ROW], torch.add),
    OpRecord("add_column_first", ops.add, [COLUMN, A], torch.add),
    OpRecord("add_self", lambda t: ops.add(t, t), [A], lambda t: t + t),
    OpRecord("add_", _add_in_place, [A, ROW], lambda x, y: (x + y, x + y)),
    OpRecord("sub", ops.sub, [A, COLUMN], torch.sub),
    OpRecord("sub_broadcast_both", ops.sub, [COLUMN, ROW], torch.sub),
    OpRecord("mul", ops.mul, [A, ROW], torch.mul),
    OpRecord("mul_scalar", lambda t: t * 3.0, [A], lambda t: t * 3.0),
    OpRecord("div", ops.div, [A, POSITIVE], torch.div),
    OpRecord("div_scalar_over", lambda t: 2.0 / t, [POSITIVE], lambda t: 2.0 / t),
    OpRecord("div_int", ops.div, list(INTS), lambda x, y: torch.div(x, y, rounding_mode="trunc"),
             ("float32",), False, "integers", outputs=("int32",)),
    OpRecord("fmod", ops.fmod, [A, POSITIVE + 0.5], torch.fmod),
    OpRecord("fmod_int", ops.fmod, list(INTS), torch.fmod, ("float32",), False, "integers",
             outputs=("int32",)),
    OpRecord("pow", ops.pow, [POSITIVE, B], torch.pow),
    OpRecord("pow_number", lambda t: ops.pow(t, 2), [A], lambda t: t**2),
    OpRecord("pow_at_0", lambda t: ops.pow(t, 3.0), [np.array([0.0, -1.0, 2.0])], lambda t: t**3),
    OpRecord("maximum", ops.maximum, [A, B, ROW],
             lambda x, y, z: torch.maximum(torch.maximum(x, y), z)),
    OpRecord("scaled_add", lambda x, y: ops.scaled_add(x, y, 0.5, 3.0), [A, B],
             lambda x, y: 0.5 * x + 3 * y),
    OpRecord("scaled_add_tensors", ops.scaled_add, [A, B, rand(), rand(1, seed=4)],
             lambda x, y, a, b: a * x + b * y),
    OpRecord("scaled_add_mixed", lambda x, y: ops.scaled_add(x, y, b=0.25),
             [A, B.astype(np.float16)], lambda x, y: x + 0.25 * y, tolerance=30,
             why="the gradient of the float16 input is rounded to float16"),
    OpRecord("scaled_add_", _scaled_add_in_place, [A, B],
             lambda x, y: (0.5 * x - 2 * y, 0.5 * x - 2 * y)),
    OpRecord("increment_mod", lambda t: ops.increment_mod(t, 3, 5), [np.arange(6, dtype=np.int32)],
             lambda t: (t + 3) % 5, ("float32",), False, COUNTER, outputs=("int32",)),
    OpRecord("increment_mod_", _increment_in_place, [np.arange(6, dtype=np.uint32)],
             lambda t: ((t + 3) % 5, (t + 3) % 5), ("float32",), False, COUNTER,
             outputs=("uint32", "uint32")),
    OpRecord("increment_mod_float", lambda t: ops.increment_mod(t, 0.5, 2.0), [POSITIVE],
             lambda t: (t + 0.5) % 2.0, ("float32",), False, COUNTER),
]  # fmt: skip
