"""Functions of one tensor."""

from __future__ import annotations

import numpy as np
import torch

import popxl
from popxl import ops
from tests.popxl.ops.harness import OpRecord, rand

STEP = "piecewise constant"
BOOLEAN = "boolean output"
ANY = rand(3, 5)
POSITIVE = rand(3, 5, low=0.2, high=3.0)
SPECIAL = np.array([0.0, 1.5, -np.inf, np.inf, np.nan], np.float32)

RECORDS = [
    OpRecord("abs", ops.abs, [ANY], torch.abs),
    OpRecord("abs_at_0", ops.abs, [np.array([0.0, 1.0])], torch.abs),
    OpRecord("abs_int", ops.abs, [np.array([-3, 4], np.int32)], torch.abs, ("float32",), False,
             "integer input", outputs=("int32",)),
    OpRecord("negate", ops.negate, [ANY], torch.neg),
    OpRecord("sign", ops.sign, [np.array([-2.0, 0.0, 3.0])], torch.sign, grad=False, why=STEP),
    OpRecord("floor", ops.floor, [ANY], torch.floor, grad=False, why=STEP),
    OpRecord("ceil", ops.ceil, [ANY], torch.ceil, grad=False, why=STEP),
    OpRecord("clip", lambda t: ops.clip(t, -1.0, 0.5), [ANY], lambda t: torch.clamp(t, -1.0, 0.5)),
    OpRecord("clamp_below", lambda t: ops.clamp(t, min=0.3), [ANY],
             lambda t: torch.clamp(t, min=0.3)),
    OpRecord("sqrt", ops.sqrt, [POSITIVE], torch.sqrt),
    OpRecord("exp", ops.exp, [ANY], torch.exp),
    OpRecord("exp_", lambda t: (lambda x: (ops.exp_(x), x))(ops.identity(t)), [ANY],
             lambda t: (t.exp(), t.exp())),
    OpRecord("log", ops.log, [POSITIVE], torch.log),
    OpRecord("log2", ops.log2, [POSITIVE], torch.log2),
    OpRecord("sin", ops.sin, [ANY], torch.sin),
    OpRecord("cos", ops.cos, [ANY], torch.cos),
    OpRecord("isnan", ops.isnan, [SPECIAL], torch.isnan, ("float32",), False, BOOLEAN,
             outputs=("bool",)),
    OpRecord("isinf", ops.isinf, [SPECIAL], torch.isinf, ("float32",), False, BOOLEAN,
             outputs=("bool",)),
    OpRecord("isfinite", ops.isfinite, [SPECIAL], torch.isfinite, ("float32",), False, BOOLEAN,
             outputs=("bool",)),
    OpRecord("cast_to_half", lambda t: ops.cast(t, popxl.float16), [ANY],
             lambda t: t, ("float32", "float16"), tolerance=100, outputs=("float16",),
             why="the result and its gradient are rounded to float16"),
    OpRecord("cast_to_float", lambda t: ops.cast(t, popxl.float32), [ANY], lambda t: t,
             outputs=("float32",)),
    OpRecord("cast_to_int", lambda t: ops.cast(t, popxl.int32), [ANY],
             lambda t: t.to(torch.int64), grad=False, why="integer output", outputs=("int32",)),
    OpRecord("cast_from_int", lambda t: ops.cast(t, popxl.float32), [np.arange(4, dtype=np.int32)],
             lambda t: t.double(), ("float32",), False, "integer input"),
    OpRecord("identity", ops.identity, [ANY], lambda t: t),
    OpRecord("materialise", ops.materialise, [ANY], lambda t: t),
    OpRecord("rename", lambda t: ops.rename(t, "named"), [ANY], lambda t: t),
    OpRecord("detach", lambda t: ops.add(t, ops.detach(t)), [ANY], lambda t: t + t.detach()),
    OpRecord("detach_", lambda t: ops.mul(t, ops.detach_(t)), [ANY], lambda t: t * t.detach()),
]  # fmt: skip
