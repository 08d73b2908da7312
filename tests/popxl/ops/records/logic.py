"""Comparisons, Boolean functions, selection."""

from __future__ import annotations

import numpy as np
import torch

from popxl import ops
from tests.popxl.ops.harness import OpRecord, ints, rand

BOOLEAN = "boolean output"
FEW = ints(3, 4, high=3), ints(4, high=3, seed=1)
FLAGS = np.array([True, True, False, False]), np.array([True, False, True, False])
A, ROW = rand(3, 4), rand(4, seed=1)


def _boolean(name, build, inputs, reference):
    return OpRecord(name, build, inputs, reference, ("float32",), False, BOOLEAN, outputs=("bool",))


RECORDS = [
    _boolean("equal", ops.equal, FEW, torch.eq),
    _boolean("equal_bool", ops.equal, FLAGS, torch.eq),
    _boolean("greater", ops.greater, [A, ROW], torch.gt),
    _boolean("greater_int", ops.greater, FEW, torch.gt),
    _boolean("logical_and", ops.logical_and, FLAGS, torch.logical_and),
    _boolean("logical_and_numbers", ops.logical_and, FEW, torch.logical_and),
    _boolean("logical_or", ops.logical_or, FLAGS, torch.logical_or),
    _boolean("logical_not", ops.logical_not, FLAGS[:1], torch.logical_not),
    OpRecord("where", ops.where, [FLAGS[0], A, ROW], torch.where),
    OpRecord("where_ints", ops.where, [FEW[1], A, A[:1]], lambda c, x, y: torch.where(c > 0, x, y)),
]
